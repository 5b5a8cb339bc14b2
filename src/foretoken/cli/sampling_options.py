"""Sampling options of the command line, in groups as `--help` shows them: derived from what the
fields of `SamplingParams` declare."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args

from typer import Option

from foretoken.errors import InputError, RefusedError, shown
from foretoken.sampling.checks import (
    Check,
    Choice,
    Count,
    Number,
    as_biases,
    as_decay,
    as_flag,
    as_id,
    as_ids,
    as_logit_bias,
    as_sequences,
    as_strings,
)
from foretoken.sampling.options import DeclaredOption, Panel
from foretoken.sampling.params import OPTIONS, SamplingParams
from foretoken.storage.files import read_text


def as_json(name: str, value: str) -> Any:
    """Read an option's value that is JSON."""
    try:
        read = json.loads(value)
        json.dumps(read, allow_nan=False)
    except (ValueError, RecursionError) as error:
        raise InputError(f"{name} is {shown(value)}, which is no JSON: {error}") from None
    return read


def _ids(name: str, value: str) -> list[int]:
    try:
        return [int(part) for part in value.split(",") if part.strip()]
    except ValueError:
        raise InputError(f"{name} is {shown(value)}; give ids with commas between") from None


def _decay(name: str, value: str) -> list[float]:
    start, _, factor = value.partition(",")
    try:
        return [int(start), float(factor)]
    except ValueError:
        raise InputError(f"{name} is {shown(value)}; give START,FACTOR, such as 30,1.05") from None


# Kinds of options: how the command line takes a value, and how it reads one that is text
KINDS: dict[Any, Any] = {
    Number: float,
    Count: int,
    Choice: str,
    as_id: int,
    as_flag: bool,
    as_strings: list[str],
}
READERS: dict[Check, Callable[[str, str], Any]] = {
    as_ids: _ids,
    as_sequences: as_json,
    as_biases: as_json,
    as_logit_bias: as_json,
    as_decay: _decay,
}
COMMAS = "{} Give ids with commas between."


def typer_option(name: str, declared: DeclaredOption, text: str) -> Any:
    """Return the annotation that makes a field an option."""
    check = declared.check
    kind = KINDS.get(check, KINDS.get(type(check), str))
    flag = declared.flag or f"--{name.replace('_', '-')}"
    help = COMMAS.format(text) if check is as_ids else text
    metavar = "<str>" if kind == list[str] else None  # "<list[str]>" is too wide
    option = Option(flag, help=help, rich_help_panel=declared.panel, metavar=metavar)
    return Annotated[kind if kind is bool else kind | None, option]


def group(name: str, declarations: Mapping[str, DeclaredOption], left_out: object) -> Any:
    """Make a dataclass of these options; one that is not given is as in `left_out`, or None."""
    members: list[tuple[str, Any, Any]] = []
    for each, declared in declarations.items():
        default = getattr(left_out, each)
        default = bool(default) if declared.check is as_flag else default
        default = None if default == () else default
        annotation = typer_option(each, declared, declared.help)
        members.append((each, annotation, field(default=default)))
    return make_dataclass(name, members, frozen=True)


def _declared(*, one_text: bool) -> dict[str, DeclaredOption]:
    """Return the options for commands with one text, or all others, by panel."""
    names = [n for n, each in OPTIONS.items() if each.one_text is one_text and n != "structured"]
    return {n: OPTIONS[n] for panel in get_args(Panel) for n in names if OPTIONS[n].panel == panel}


SingleText: Any = group("SingleText", _declared(one_text=True), SamplingParams())
SeveralTexts: Any = group("SeveralTexts", _declared(one_text=False), SamplingParams())


def _structure(text: str, *, metavar: str | None = None) -> Any:
    return Option(help=text, rich_help_panel=OPTIONS["structured"].panel, metavar=metavar)


@dataclass(frozen=True)
class Structure:
    """Options of `structured`, a constraint on the text; at most one may be given."""

    json_schema: Annotated[
        Path | None, _structure("Make the text match the JSON schema in this file.")
    ] = None
    regex: Annotated[str | None, _structure("Make the text match this regular expression.")] = None
    grammar: Annotated[
        Path | None, _structure("Make the text match the Lark grammar in this file.")
    ] = None
    choice: Annotated[
        list[str] | None,
        _structure("Allow this text; repeat for others.", metavar="<str>"),
    ] = None

    def structured(self) -> dict[str, Any] | None:
        """Return the value of `structured`, files read; None where no option is given."""
        values = {field.name: getattr(self, field.name) for field in fields(Structure)}
        names = [name for name, value in values.items() if value not in (None, [])]
        if len(names) > 1:
            flags = " and ".join(f"--{name.replace('_', '-')}" for name in names)
            raise RefusedError(f"a text cannot follow {flags} at once; give one of them")
        if not names:
            return None
        if self.json_schema is not None:
            return {"json_schema": _schema(self.json_schema)}
        if self.grammar is not None:
            return {"lark": read_text(self.grammar, "a Lark grammar")}
        return {names[0]: values[names[0]]}


@dataclass(frozen=True)
class OneText(Structure, SingleText):
    """Sampling options of a command that writes one text at a time."""

    @property
    def given(self) -> dict[str, Any]:
        """Options the user set, keyed by field of `SamplingParams`, as JSON values. InputError for
        one that is invalid by itself."""
        values: dict[str, Any] = {**vars(self), "structured": self.structured()}
        left_out = {field.name: field.default for field in fields(self)}
        options: dict[str, Any] = {}
        for name, declared in OPTIONS.items():  # in this order errors are told
            value = values.get(name)
            if value is None or value is False or value == [] or value == left_out.get(name):
                continue
            reader = READERS.get(declared.check)
            options[name] = reader(name, value) if reader else value
            declared.check(name, options[name])
        return options


@dataclass(frozen=True)
class OneAnswer(OneText):
    """Sampling options of a chat, whose answers should end by themselves."""

    max_new_tokens: Annotated[
        int | None,
        Option(
            help="New tokens per answer, at most. Default: the room in the context.",
            rich_help_panel=OPTIONS["max_new_tokens"].panel,
        ),
    ] = None


@dataclass(frozen=True)
class SamplingOptions(SeveralTexts, OneText):
    """All sampling options."""


def _schema(file: Path) -> Any:
    try:
        return json.loads(read_text(file, "a JSON schema"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise InputError(f"{file} is no JSON: {error}; give a JSON schema") from None
