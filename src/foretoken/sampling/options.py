"""The declaration of an option: its check, its help text and its names.

Every field of `SamplingParams`, `LoadOptions`, `EngineOptions` and `ServerOptions` declares its
option once, with `option`. The declaration determines how the value is checked, the option on the
command line (`cli.option`, `cli.serve`), the field in server requests (`server.api.protocol`), the
key in a JSONL line and the row in the tables of the docs. This module does not import torch.
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
    """An option's field in requests to a server: it has OpenAI's name or, if OpenAI has no such
    field, vLLM's name. `bounds`: bounds in requests, by pydantic's names, in addition to the bounds
    of the option's check.
    """

    name: str
    bounds: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """The declaration of one option, stored in its field.

    Attributes:
        check: Converts a caller's value to the stored value, or raises InputError.
        help: One sentence, for `--help`, the server's schema and the docs.
        panel: Its group in `--help`; None for options of Python only, such as callables.
        flag: Its flag on the command line, if it differs from the field's name.
        api: Its field in a request to the server. None if it has no such field, or if endpoints
            differ in the type of the field, as for `logprobs`.
        aliases: Names of the same option in other libraries, for suggestions in error messages.
        one_text: True if commands that generate one output at a time accept the option.
        group: The commands that accept the option, if `cli.option` groups them.
        off: Values, in addition to None, that turn the option off in a model's generation config;
            () if foretoken does not use this entry of the config.
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
    """Return a dataclass field that declares an option with this default. The arguments are
    attributes of `DeclaredOption`; `api` may also be a string: the field's name in requests."""
    if isinstance(api := more.get("api"), str):
        more["api"] = ApiField(api)
    declared = DeclaredOption(check, help, panel, **more)
    return field(default=default, metadata={DeclaredOption: declared})


def get_options(kind: Any) -> dict[str, DeclaredOption]:
    """Return the declarations of a dataclass's options by field name, in the order of the
    fields."""
    members: tuple[Field[Any], ...] = fields(kind)
    return {each.name: each.metadata[DeclaredOption] for each in members}


def check_options(options: Any) -> None:
    """Check each field of an options dataclass with its declared check, and store the checked value
    in the field. None is accepted unchecked if it is the default. Raises an InputError that names
    the option."""
    for member in fields(options):
        value = getattr(options, member.name)
        if value is not None or member.default is not None:
            with name_option_in_errors(member.name):
                checked = member.metadata[DeclaredOption].check(member.name, value)
            object.__setattr__(options, member.name, checked)


def add_args_section(docstring: str, options: Mapping[str, DeclaredOption]) -> str:
    """Return a docstring with the help texts of these options added at the end of its Args section,
    or in a new Args section before `Raises:`."""
    args = "".join(f"        {name}: {each.help}\n" for name, each in options.items())
    if "    Args:\n" in docstring:
        before, begin, rest = docstring.partition("    Args:\n")
        own, end, after = rest.partition("\n\n")
        return f"{before}{begin}{own}\n{args.rstrip()}{end}{after}"
    before, raises, after = docstring.partition("    Raises:\n")
    return f"{before}    Args:\n{args}\n{raises}{after}"
