"""A function as Typer takes it: groups of options become single ones, and help keeps no line breaks
of ours, as the terminal makes its own."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import wraps
from inspect import Parameter, Signature
from typing import Any, get_type_hints


def command(function: Callable[..., None]) -> Callable[..., None]:
    """`function`, taking the fields of its dataclass parameters instead of the dataclasses.

    The fields are `Annotated` with an Option and have defaults, as parameters of commands are.
    """
    hints: dict[str, Any] = get_type_hints(function, include_extras=True)
    groups: dict[str, Any] = {n: kind for n, kind in hints.items() if is_dataclass(kind)}

    @wraps(function)
    def called(**given: Any) -> None:
        for name, kind in groups.items():
            given[name] = kind(**{field.name: given.pop(field.name) for field in fields(kind)})
        function(**given)

    own = inspect.signature(function).parameters.values()
    single = [one.replace(annotation=hints[one.name]) for one in own if one.name not in groups]
    single += [option for kind in groups.values() for option in _options(kind)]
    keyed = [one.replace(kind=Parameter.KEYWORD_ONLY) for one in single]
    called.__signature__ = Signature(keyed)  # pyright: ignore[reportAttributeAccessIssue]
    called.__annotations__ = {one.name: one.annotation for one in keyed}
    called.__doc__ = _unwrapped(inspect.getdoc(function) or "")
    return called


def _options(kind: Any) -> list[Parameter]:
    hints = get_type_hints(kind, include_extras=True)
    return [
        Parameter(f.name, Parameter.KEYWORD_ONLY, default=f.default, annotation=hints[f.name])
        for f in fields(kind)
    ]


def _unwrapped(text: str) -> str:
    """Every paragraph on one line."""
    return re.sub(r"(?<!\n)\n(?!\n)", " ", text)
