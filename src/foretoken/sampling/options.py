"""The declaration of an option: its check, its help text and its names.

Every field of `SamplingParams`, `LoadOptions`, `EngineOptions` and `ServerOptions` declares its
option once, with `option`. From the declaration follow the check of its value, the command line
(`cli.option`, `cli.serve`), the server's fields (`server.api.wire`), the keys of a JSONL line and
the tables of the docs. This module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar

from foretoken.errors import name_option_in_errors
from foretoken.sampling.checks import Check

T = TypeVar("T")
Panel = Literal[
    "Sampling",
    "Stop conditions",
    "Penalties and bans",
    "Structured output",
    "Reported",
    "Loading",
    "Serving",
]


@dataclass(frozen=True, slots=True)
class ApiField:
    """An option's field in requests to a server: OpenAI's name or, if OpenAI has none, vLLM's.

    `bounds`: bounds in requests, in addition to the check's, by pydantic's names.
    """

    name: str
    bounds: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """The declaration of one option, stored in its field.

    Attributes:
        check: Converts a caller's value to the field's, or raises InputError.
        help: One sentence, for `--help`, the server's schema and the docs.
        panel: Its group in `--help`; None for options of Python only, such as callables.
        flag: Its flag on the command line, if it differs from the field's name.
        api: Its field in a request to the server; None if it has none, or if endpoints differ in
            more than the name.
        aliases: Names of the same option in other libraries, for suggestions in error messages.
        one_text: True if commands that generate one output at a time have it.
        group: The commands that have it, if `cli.option` groups them.
        off: Values, in addition to None, at which the entry of this name in a model's generation
            config changes nothing; () if that entry is not used.
    """

    check: Check
    help: str
    panel: Panel | None
    flag: str | None = None
    api: ApiField | None = None
    aliases: tuple[str, ...] = ()
    one_text: bool = True
    group: str = ""
    off: tuple[Any, ...] = ()


def option(default: T, check: Check, help: str, panel: Panel | None, **more: Any) -> T:
    """Declare a field of a dataclass of options. The arguments after `default` are those of
    `DeclaredOption`; `api` may be just a name."""
    if isinstance(api := more.get("api"), str):
        more["api"] = ApiField(api)
    declared = DeclaredOption(check, help, panel, **more)
    return field(default=default, metadata={DeclaredOption: declared})


def get_options(kind: Any) -> dict[str, DeclaredOption]:
    """Return the options that a dataclass declares, by field, in their order."""
    members: tuple[Field[Any], ...] = fields(kind)
    return {each.name: each.metadata[DeclaredOption] for each in members}


def check_options(options: Any) -> None:
    """Check the fields of a dataclass of options by their declarations, and replace each by the
    result of its check. None is valid if it is the default. Raises InputError about the option."""
    for member in fields(options):
        value = getattr(options, member.name)
        if value is not None or member.default is not None:
            with name_option_in_errors(member.name):
                checked = member.metadata[DeclaredOption].check(member.name, value)
            object.__setattr__(options, member.name, checked)


def add_args_section(docstring: str, options: Mapping[str, DeclaredOption]) -> str:
    """Return a docstring with the help texts of these options added at the end of its Args section,
    or in a new one before `Raises:`."""
    args = "".join(f"        {name}: {each.help}\n" for name, each in options.items())
    if "    Args:\n" in docstring:
        before, begin, rest = docstring.partition("    Args:\n")
        own, end, after = rest.partition("\n\n")
        return f"{before}{begin}{own}\n{args.rstrip()}{end}{after}"
    before, raises, after = docstring.partition("    Raises:\n")
    return f"{before}    Args:\n{args}\n{raises}{after}"
