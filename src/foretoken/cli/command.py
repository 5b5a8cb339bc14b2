"""Converts functions to Typer commands: each field of a dataclass parameter becomes an option, and
each paragraph of the docstring becomes one line of help. Also defines the option `--config FILE`
and the logging of commands."""

from __future__ import annotations

import inspect
import logging
import re
import sys
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from foretoken.errors import InputError, to_one_line
from foretoken.sampling.params import suggest_name
from foretoken.slow_log import log_if_slow
from foretoken.storage.files import read_text

SLOW_IMPORT_SECONDS = 5.0  # the first import after an installation takes up to a minute
log = logging.getLogger(__name__)
# Modules whose INFO messages are printed, for example about long loads and the chosen draft
INFO_MODULES = (
    "cli.command",
    "costing.probe",
    "loading.draft_choice",
    "loading.load",
    "loading.translated_drafts",
    "models.store",
)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Wrap a function for Typer: replace each dataclass parameter by one parameter per field.

    Fields must have defaults. Fields and other parameters must be `Annotated` with a Typer Option
    or a help text. A dataclass may set `panel`, the title above its options in the help.
    """
    hints: dict[str, Any] = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {name: kind for name, kind in hints.items() if is_dataclass(kind)}

    @wraps(function)
    def wrapper(**options: Any) -> None:
        for name, kind in groups.items():
            options[name] = kind(**{f.name: options.pop(f.name) for f in fields(kind)})
        function(**options)

    parameters = [
        parameter.replace(annotation=make_option(name, hints[name]), kind=Parameter.KEYWORD_ONLY)
        for name, parameter in inspect.signature(function).parameters.items()
        if name not in groups
    ]
    for kind in groups.values():
        typed, panel = get_type_hints(kind, include_extras=True), getattr(kind, "panel", None)
        for f in fields(kind):
            option = make_option(f.name, typed[f.name], panel)
            given = Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=option)
            parameters.append(given)
    wrapper.__signature__ = Signature(parameters)  # pyright: ignore[reportAttributeAccessIssue]
    wrapper.__annotations__ = {p.name: p.annotation for p in parameters}
    wrapper.__doc__ = join_paragraph_lines(function)
    return wrapper


def format_flag(name: str) -> str:
    """Return the command-line flag for a field: "--top-k" for "top_k"."""
    return f"--{name.replace('_', '-')}"


def make_option(name: str, hint: Any, panel: str | None = None) -> Any:
    """Return a parameter's annotation for Typer: `Annotated[type, "help text"]` becomes
    `Annotated[type, Option(help=...)]`; any other annotation is returned unchanged."""
    kind, note, *_ = (*get_args(hint), None, None)
    if get_origin(hint) is not Annotated or not isinstance(note, str):
        return hint
    names = [format_flag(name)] if kind is bool else []  # Typer would add --no-NAME
    metavar = "<str>" if kind == list[str] | None else None  # "<list[str]>" is too wide
    return Annotated[kind, typer.Option(*names, help=note, rich_help_panel=panel, metavar=metavar)]


def join_paragraph_lines(function: Callable[..., None]) -> str:
    """Return a function's docstring with every paragraph joined to one line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")


class StderrLines(logging.Handler):
    """Log handler that prints to the current sys.stderr, which a progress bar may have replaced.
    Messages during a streamed reply are printed after the reply."""

    held: list[str] | None = None  # delayed messages; None: no reply is being streamed

    def emit(self, record: logging.LogRecord) -> None:
        if StderrLines.held is None:
            print(record.getMessage(), file=sys.stderr)
        else:
            StderrLines.held.append(record.getMessage())


def hold_messages() -> None:
    """Delay log messages from now on, because a reply is being streamed."""
    StderrLines.held = StderrLines.held or []


def release_messages() -> None:
    """Print the log messages that were delayed during a reply; do not delay later messages."""
    held, StderrLines.held = StderrLines.held, None
    for message in held or ():
        print(message, file=sys.stderr)


def set_up_logging() -> None:
    """Print foretoken's warnings and messages about slow work on standard error. Turn off
    transformers' progress bars and logging, so that an error is a single line."""
    ours = logging.getLogger("foretoken")
    if not ours.handlers:
        ours.addHandler(StderrLines())
    for module in INFO_MODULES:
        logging.getLogger(f"foretoken.{module}").setLevel(logging.INFO)
    with log_if_slow(log, "importing PyTorch and transformers", after=SLOW_IMPORT_SECONDS):
        from transformers.utils import logging as transformers  # late: it takes seconds

        import foretoken.loading.load  # noqa: F401 - one log message covers both imports

    transformers.set_verbosity_error()
    transformers.disable_progress_bar()


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Callback of --config: use the values in a YAML file as the defaults of options. Raises
    InputError for a file that is not a mapping of known options."""
    if path is None:
        return None
    import yaml  # late: only --config needs it; a dependency of transformers

    try:
        content = yaml.safe_load(read_text(path, "a YAML mapping of options"))
    except yaml.YAMLError as error:
        raise InputError(f"{path} is not valid YAML: {to_one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} is not a mapping; give lines such as 'port: 8000'")
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    known = {str(parameter.name) for parameter in context.command.params} - {"config"}
    if unknown := sorted(options.keys() - known):
        near = suggest_name(unknown[0], known)
        remedy = f"did you mean {near}?" if near else "see --help"
        raise InputError(f"{path} has the unknown option {unknown[0]!r}; {remedy}")
    for parameter in context.command.params:
        if isinstance(options.get(str(parameter.name)), str) and getattr(parameter, "multiple", 0):
            options[str(parameter.name)] = [options[str(parameter.name)]]  # repeatable
    context.default_map = {**(context.default_map or {}), **options}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        help="Read options from a YAML file. Options of the command line override the file.",
        callback=_read_config,
        is_eager=True,
    ),
]
