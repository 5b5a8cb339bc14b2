"""`/set NAME VALUE`: a wish of the command line, changed while a command runs, read and checked as
its option is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_type_hints

from foretoken.cli.sampling_options import OneText
from foretoken.errors import InputError, shown
from foretoken.sampling.params import meant
from foretoken.storage.files import parse_json

W = TypeVar("W", bound=OneText)
SWITCH = {"on": True, "true": True, "off": False, "false": False}
NUMBERS: dict[Any, tuple[Any, str]] = {int: (int, "a whole number"), float: (float, "a number")}


def changed(wishes: W, first: W, name: str, value: str) -> W:
    """The wishes with another one; where the value is "", as it was at first. InputError for an
    unknown name and for a value of the wrong kind; other checks are `given`'s."""
    options = _names(type(wishes))
    key = options.get(name.lstrip("-").replace("-", "_"))
    if key is None:
        near = meant(name, options)
        remedy = f"did you mean {near}?" if near else f"give one of {', '.join(options)}"
        raise InputError(f"{shown(name)} cannot be set; {remedy}")
    read = _read(key, get_type_hints(type(wishes))[key], value) if value else getattr(first, key)
    return replace(wishes, **{key: read})


def _names(kind: type) -> dict[str, str]:
    """The fields by their own names and by those of their options, such as stop."""
    names: dict[str, str] = {}
    for name, hint in get_type_hints(kind, include_extras=True).items():
        option = hint.__metadata__[0]
        # Typer takes the first flag for a default until the command is made
        flags = [f for f in (option.default, *(option.param_decls or ())) if isinstance(f, str)]
        names |= {flag.lstrip("-").replace("-", "_"): name for flag in flags} | {name: name}
    return names


def _read(name: str, hint: Any, value: str) -> Any:
    """A value of the option's kind."""
    kinds = get_args(hint) if isinstance(hint, UnionType) else (hint,)
    kind = next(kind for kind in kinds if kind is not NoneType)
    if kind in NUMBERS:
        convert, remedy = NUMBERS[kind]
        try:
            return convert(value)
        except ValueError:
            raise InputError(f"{name} is {shown(value)}; give {remedy}") from None
    if kind is bool:
        if value.lower() not in SWITCH:
            raise InputError(f"{name} is {shown(value)}; give on or off")
        return SWITCH[value.lower()]
    if kind is Path:
        return Path(value).expanduser()
    return value if kind is str else _texts(name, value)


def _texts(name: str, value: str) -> list[str]:
    """One text, or a JSON list of them: so that a line's end can be written down."""
    if not value.startswith("["):
        return [value]
    try:
        read = parse_json(value)
    except ValueError as error:
        raise InputError(f"{name} is {shown(value)}, which is no JSON: {error}") from None
    if not all(isinstance(text, str) for text in read):
        raise InputError(f"{name} is {shown(value)}; give a list of texts")
    return read
