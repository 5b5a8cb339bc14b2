"""Commands as Typer takes them, their `--config FILE`, and what they log.

Dataclasses of options become single options, and paragraphs of the help text single lines, which
the terminal breaks itself.
"""

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

SLOW_IMPORT_SECONDS = 5.0  # seconds; the first import after an installation takes up to a minute
log = logging.getLogger(__name__)
# Modules whose work is told as well as their warnings: long loads, and which draft was chosen
INFO_MODULES = (
    "cli.command",
    "costing.probe",
    "loading.draft_choice",
    "loading.load",
    "loading.translated_drafts",
    "models.store",
)


def command(function: Callable[..., None]) -> Callable[..., None]:
    """Give a function the fields of its dataclass parameters as parameters of its own.

    The fields have defaults, and are `Annotated` with an Option or with a help text, as other
    parameters are. A dataclass may name its `panel` of the help.
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
    """Return the flag of an option's field."""
    return f"--{name.replace('_', '-')}"


def make_option(name: str, hint: Any, panel: str | None = None) -> Any:
    """Return a parameter's annotation as Typer takes it; a text in it is an option's help."""
    kind, note, *_ = (*get_args(hint), None, None)
    if get_origin(hint) is not Annotated or not isinstance(note, str):
        return hint
    names = [format_flag(name)] if kind is bool else []  # or there would be a --no-NAME too
    metavar = "<str>" if kind == list[str] | None else None  # "<list[str]>" is too wide
    return Annotated[kind, typer.Option(*names, help=note, rich_help_panel=panel, metavar=metavar)]


def join_paragraph_lines(function: Callable[..., None]) -> str:
    """Return a docstring with every paragraph on one line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", inspect.getdoc(function) or "")


class StderrLines(logging.Handler):
    """Prints to the sys.stderr of the moment: a bar being drawn replaces it, and keeps messages on
    lines of their own. While an answer is printed, messages wait for its end."""

    held: list[str] | None = None  # messages that wait; None where no answer is being printed

    def emit(self, record: logging.LogRecord) -> None:
        if StderrLines.held is None:
            print(record.getMessage(), file=sys.stderr)
        else:
            StderrLines.held.append(record.getMessage())


def hold_messages() -> None:
    """Let messages wait, as an answer is being printed from now on."""
    StderrLines.held = StderrLines.held or []


def release_messages() -> None:
    """Print the messages that waited, as the answer has ended."""
    held, StderrLines.held = StderrLines.held, None
    for message in held or ():
        print(message, file=sys.stderr)


def set_up_logging() -> None:
    """Log foretoken's warnings to standard error, and work that takes over a second; turn off
    transformers' bars and reports, so that an error is one line."""
    ours = logging.getLogger("foretoken")
    if not ours.handlers:
        ours.addHandler(StderrLines())
    for module in INFO_MODULES:
        logging.getLogger(f"foretoken.{module}").setLevel(logging.INFO)
    with log_if_slow(log, "importing PyTorch and transformers", after=SLOW_IMPORT_SECONDS):
        from transformers.utils import logging as transformers  # late: it takes seconds

        import foretoken.loading.load  # noqa: F401 - that is told once

    transformers.set_verbosity_error()
    transformers.disable_progress_bar()


def _read_config(context: typer.Context, path: Path | None) -> Path | None:
    """Take the values of a file as defaults."""
    if path is None:
        return None
    import yaml  # late: transformers brings it, and only this needs it

    try:
        content = yaml.safe_load(read_text(path, "a YAML mapping of options"))
    except yaml.YAMLError as error:
        raise InputError(f"{path} is no YAML: {to_one_line(error)}") from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds no mapping; give lines such as 'port: 8000'")
    options = {str(name).replace("-", "_"): value for name, value in content.items()}
    known = {str(parameter.name) for parameter in context.command.params} - {"config"}
    if unknown := sorted(options.keys() - known):
        near = suggest_name(unknown[0], known)
        remedy = f"did you mean {near}?" if near else "see --help"
        raise InputError(f"{path} holds the unknown option {unknown[0]!r}; {remedy}")
    for parameter in context.command.params:
        if isinstance(options.get(str(parameter.name)), str) and getattr(parameter, "multiple", 0):
            options[str(parameter.name)] = [options[str(parameter.name)]]  # one of several
    context.default_map = {**(context.default_map or {}), **options}
    return path


Config = Annotated[
    Path | None,
    typer.Option(
        help="Read options by name from a YAML file. The command line wins.",
        callback=_read_config,
        is_eager=True,
    ),
]
