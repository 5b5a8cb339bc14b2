"""Declaration of an option: all that is said of it besides its type and default.

Every field of `SamplingParams`, `LoadOptions`, `EngineOptions` and `ServerOptions` declares its
option once, with `option`. The check of its value, the command line (`cli.option`, `cli.serve`),
the server's fields (`server.api.wire`), the keys of a JSONL line and the tables of the docs are
derived from the declaration. Knows no tensors.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar

from foretoken.errors import naming_option
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
    """An option's field in requests to a server: OpenAI's name or, where that lacks one, vLLM's.

    `bounds`: those that a request has besides the check's, in pydantic's names.
    """

    name: str
    bounds: Mapping[str, float] = field(default_factory=dict[str, float])


@dataclass(frozen=True, slots=True)
class DeclaredOption:
    """Declaration of one option, by its field.

    Attributes:
        check: Makes a caller's value the field's, or raises InputError.
        help: One sentence, for `--help`, the server's schema and the docs.
        panel: Its group in `--help`; None for one that no command line or JSONL line has, as for
            code, which no text can hold.
        flag: Its flag on the command line, where that is not the field's name.
        api: Its field in a request to the server; None where it has none, or where endpoints
            differ in more than a name.
        aliases: Names that other libraries have for it, to suggest this one for them.
        one_text: True if commands that write one text at a time take it.
        group: The commands that take it, where `cli.option` has groups.
        off: Values, beside None, at which the entry of this name in a model's generation config
            changes nothing; () where no such entry is followed.
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
    """Declare a field of a dataclass of options; arguments but the default are `DeclaredOption`'s,
    and `api` may be a name alone."""
    if isinstance(api := more.get("api"), str):
        more["api"] = ApiField(api)
    declared = DeclaredOption(check, help, panel, **more)
    return field(default=default, metadata={DeclaredOption: declared})


def get_options(kind: Any) -> dict[str, DeclaredOption]:
    """The options that a dataclass declares, by field, in their order."""
    members: tuple[Field[Any], ...] = fields(kind)
    return {each.name: each.metadata[DeclaredOption] for each in members}


def check_options(options: Any) -> None:
    """Check the fields of a dataclass of options, each by its declaration; None passes where it is
    the default. Fields become what their checks return. Raises InputError, about the option."""
    for member in fields(options):
        value = getattr(options, member.name)
        if value is not None or member.default is not None:
            with naming_option(member.name):
                checked = member.metadata[DeclaredOption].check(member.name, value)
            object.__setattr__(options, member.name, checked)


def add_args_section(docstring: str, options: Mapping[str, DeclaredOption]) -> str:
    """Return a docstring with the help texts of these options in its Args section: at the end of
    one that it has, else of a new one before `Raises:`."""
    args = "".join(f"        {name}: {each.help}\n" for name, each in options.items())
    if "    Args:\n" in docstring:
        before, begin, rest = docstring.partition("    Args:\n")
        own, end, after = rest.partition("\n\n")
        return f"{before}{begin}{own}\n{args.rstrip()}{end}{after}"
    before, raises, after = docstring.partition("    Raises:\n")
    return f"{before}    Args:\n{args}\n{raises}{after}"
