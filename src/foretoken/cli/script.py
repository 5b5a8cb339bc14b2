"""The console script `foretoken`: its commands and exit codes.

A mistake of the user prints one line on standard error and exits with code 2; a bug in foretoken
prints a traceback and exits with code 3.
"""

from __future__ import annotations

import atexit
import gc
import signal
import sys
import traceback
from typing import Annotated, Any

import typer

import foretoken
from foretoken.cli import (
    bench,
    cache,
    certify,
    chat,
    doctor,
    drafts,
    export,
    generate,
    serve,
    train,
    transcribe,
)
from foretoken.errors import ForetokenError, describe_mismatch, format_value
from foretoken.sampling.params import suggest_name

# vLLM's name of an option -> foretoken's name, for suggestions; then messages for options of vLLM
# that have no equivalent
VLLM_OPTION_NAMES = {
    "enable_prefix_caching": "prefix_cache",
    "max_model_len": "max_length",
    "max_num_seqs": "max_rows",
    "model": "target",
    "num_speculative_tokens": "gamma",
    "speculative_model": "draft",
}
ONE_DEVICE_TEXT = (
    "foretoken runs a model on one device; foretoken serve --replicas N runs several engines"
)
UNSUPPORTED_OPTIONS: dict[str, str] = {
    "pipeline_parallel_size": ONE_DEVICE_TEXT,
    "tensor_parallel_size": ONE_DEVICE_TEXT,
}


app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    help="Exact, fast generation from Transformers by speculative decoding.",
)


def _print_version(given: bool) -> None:
    if given:
        print(f"foretoken {foretoken.__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool,
        typer.Option(
            "--version", help="Print the version.", callback=_print_version, is_eager=True
        ),
    ] = False,
) -> None:
    """Options of `foretoken` without a command."""


for each in (
    generate.generate,
    chat.chat,
    transcribe.transcribe,
    bench.bench,
    certify.certify,
    serve.serve,
    doctor.doctor,
    drafts.drafts,
):
    app.command()(each)
for group, name in ((train.app, "train"), (export.app, "export"), (cache.app, "cache")):
    app.add_typer(group, name=name)


def main() -> None:
    """Run the command in sys.argv.

    Ctrl-C and SIGTERM exit with code 130, after finished completions are printed; a closed pipe
    exits with code 1.
    """
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run the command of `app` in sys.argv, print its error, if any, and exit with its code."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    # Otherwise the garbage collection at exit would take more than a second
    atexit.register(gc.freeze)
    try:
        sys.exit(app(standalone_mode=False))
    except typer.TyperException as error:  # an unknown option, or an invalid value
        context, message = getattr(error, "ctx", None), " ".join(_format_error(error).split())
        if message and context:  # "" if the help was printed instead
            message = message.removesuffix(".") + ";" * (message[-1] != "?")
            message += f" {context.command_path} --help lists all options"
        if message:
            print(f"error: {message}", file=sys.stderr)
        sys.exit(2)
    except (ForetokenError, OSError) as error:  # OSError: a file that cannot be written
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        sys.exit(2)
    except Exception as error:
        if _is_from_signal(error):
            sys.exit(130)
        traceback.print_exc()  # a bug; not exit code 1, which is a verdict of certify
        sys.exit(3)


def _is_from_signal(error: BaseException) -> bool:
    """Return whether an error was caused by the exception of a signal.

    If a signal interrupts `__set_name__`, for example during an import, Python 3.11 raises a
    RuntimeError with the signal's exception as its cause.
    """
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, KeyboardInterrupt | SystemExit):
        cause = cause.__cause__
    return cause is not None


def _format_error(error: typer.TyperException) -> str:
    """Return the message of a command line's error. For errors of pydantic and for unknown options,
    the message is clearer than the original."""
    from pydantic import ValidationError  # late: `--help` does not need it

    if isinstance(error, typer.BadParameter) and isinstance(error.__cause__, ValidationError):
        (first, *_) = error.__cause__.errors()
        error.message = f"{describe_mismatch(dict(first))}, not {format_value(first['input'])}"
    if (option := getattr(error, "option_name", None)) and hasattr(error, "possibilities"):
        return _describe_unknown_option(option, getattr(error, "ctx", None))
    return error.format_message()


def _describe_unknown_option(option: str, context: Any) -> str:
    """Return the message about an unknown option, with a suggestion if there is a similar option or
    if a subcommand has the option. `context`: click's context of the command."""
    parameters = context.command.params if context else ()
    flags = [name for each in parameters for name in each.opts if name.startswith("--")]
    for name, command in getattr(context and context.command, "commands", {}).items():
        if any(option in each.opts for each in command.params):
            path = f"{context.command_path} {name}"
            return f"No such option: {option}; options go after the command: {path} {option}"
    name, ours = _to_field_name(option), {_to_field_name(each): each for each in flags}
    near = (
        VLLM_OPTION_NAMES[name] if VLLM_OPTION_NAMES.get(name) in ours else suggest_name(name, ours)
    )
    hint = UNSUPPORTED_OPTIONS.get(name) or (f"did you mean {ours[near]}?" if near else "")
    return f"No such option: {option}{'; ' * bool(hint)}{hint}"


def _to_field_name(flag: str) -> str:
    """Return the name of the field that a flag sets: "top_k" for "--top-k"."""
    return flag.lstrip("-").replace("-", "_")
