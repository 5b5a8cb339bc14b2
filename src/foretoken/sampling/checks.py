"""Checks of sampling options. A check takes an option's name and a caller's value. It returns the
value in a hashable form, or raises an InputError that names the option and the remedy.

A check is also the type of an option: the command line and the server derive from the check how to
parse the option. This module does not import torch.
"""
# a caller's list or mapping has items of unknown types
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

from foretoken.errors import InputError, format_value, is_real_number, is_whole_number, to_float

Ids = tuple[int, ...]
Sequences = tuple[Ids, ...]
Biases = tuple[tuple[Ids, float], ...]
Grammar = Literal["json_schema", "regex", "lark", "choice"]
LogprobsOf = Literal["raw", "drawn"]


class Structured(NamedTuple):
    """A grammar that the output must match."""

    kind: Grammar
    grammar: str  # the grammar's source; for a choice, the strings as a JSON list


Check = Callable[[str, Any], Any]

MAX_ID_DIGITS = 18  # fits an int64 tensor; `int` refuses more than 4,300 digits


@dataclass(frozen=True, kw_only=True)
class Number:
    """A check that a value is a finite number within bounds; it returns a float. `remedy` describes
    the valid values in the error message."""

    remedy: str
    ge: float = -math.inf
    gt: float = -math.inf
    le: float = math.inf
    lt: float = math.inf

    def __call__(self, name: str, value: Any) -> float:
        if not is_real_number(value):
            raise InputError(f"{name} is {format_value(value)}; give a number")
        number = to_float(value)
        if not (self.gt < number < self.lt and self.ge <= number <= self.le):
            raise InputError(f"{name} is {number}; give {self.remedy}")
        return number

    @property
    def bounds(self) -> dict[str, float]:
        """The finite bounds, by pydantic's names."""
        values = {"ge": self.ge, "gt": self.gt, "le": self.le, "lt": self.lt}
        return {name: bound for name, bound in values.items() if math.isfinite(bound)}


@dataclass(frozen=True, kw_only=True)
class Count:
    """A check that a value is a whole number within bounds; it returns an int. `remedy` describes
    the valid values in the error message."""

    remedy: str
    ge: int
    le: float = math.inf

    def __call__(self, name: str, value: Any) -> int:
        if not is_whole_number(value) or not self.ge <= value <= self.le:
            named = is_whole_number(value) or self.remedy.startswith("a whole number")
            advice = self.remedy if named else "a whole number"
            raise InputError(f"{name} is {format_value(value)}; give {advice}")
        return int(value)

    @property
    def bounds(self) -> dict[str, float]:
        return {"ge": self.ge}


FROM_ONE = Count(ge=1, remedy="a whole number from 1")
SEED = Count(ge=0, le=2**63 - 1, remedy="a whole number in [0, 2**63)")


@dataclass(frozen=True)
class Choice:
    """A check that a value is one of several strings. `remedy` describes the valid strings in the
    error message; if it is empty, the message lists the strings."""

    values: tuple[str, ...]
    remedy: str = ""

    def __call__(self, name: str, value: Any) -> str:
        if value not in self.values:
            allowed = self.remedy or f"one of {', '.join(self.values)}"
            raise InputError(f"{name} is {format_value(value)}; give {allowed}")
        return value


def as_given(name: str, value: Any) -> Any:
    """Return the value unchanged, for an option that is checked later, when it is used or together
    with other options."""
    return value


def as_flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {format_value(value)}; give True or False")
    return value


def _to_list(name: str, value: Any, remedy: str) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"{name} is {format_value(value)}; give {remedy}")
    return list(cast(Iterable[Any], value))


def _check_token(name: str, value: Any) -> int:
    if not is_whole_number(value) or value < 0:
        raise InputError(f"{name} holds {format_value(value)}; give token ids, each 0 or more")
    return int(value)


def as_id(name: str, value: Any) -> int:
    value = _to_list(name, value, "one id") if isinstance(value, list | tuple) else [value]
    if len(value) != 1:
        raise InputError(f"{name} is {format_value(value)}; give one id")
    return _check_token(name, value[0])


def as_ids(name: str, value: Any) -> Ids:
    return tuple(_check_token(name, token) for token in _to_list(name, value, "a list of ids"))


def _check_sequence(name: str, value: Any) -> Ids:
    ids = as_ids(name, value)
    if not ids:
        raise InputError(f"{name} holds an empty sequence; give one or more ids in each sequence")
    return ids


def as_sequences(name: str, value: Any) -> Sequences:
    return tuple(
        _check_sequence(name, ids) for ids in _to_list(name, value, "a list of lists of ids")
    )


def as_biases(name: str, value: Any) -> Biases:
    """Return pairs of a token sequence and its bias, from a mapping or from pairs. A single id
    becomes a sequence of one token."""
    remedy = "a mapping from ids to numbers"
    pairs = list(value.items()) if isinstance(value, Mapping) else _to_list(name, value, remedy)
    biases: dict[Ids, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"{name} holds {format_value(pair)}; give {remedy}")
        ids, bias = pair
        if isinstance(ids, str):  # a key of a JSON object
            if not ids.isascii() or not ids.isdigit() or len(ids) > MAX_ID_DIGITS:
                raise InputError(f"{name} holds {format_value(ids)}; give {remedy}")
            ids = int(ids)
        ids = _check_sequence(name, [ids] if is_whole_number(ids) else ids)
        number = to_float(bias)
        if math.isnan(number) or number == math.inf:
            raise InputError(
                f"{name} adds {format_value(bias)} to {format_value(list(ids))}; give a finite "
                "number"
            )
        biases[ids] = number
    return tuple(biases.items())


def as_logit_bias(name: str, value: Any) -> Biases:
    biases = as_biases(name, value)
    for ids, _ in biases:
        if len(ids) != 1:
            raise InputError(
                f"{name} holds {format_value(list(ids))}; give single ids, or use sequence_bias"
            )
    return biases


def as_strings(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _to_list(name, value, "strings")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InputError(
                f"{name} holds {format_value(string)}; give strings that are not empty"
            )
    return tuple(dict.fromkeys(strings))


def as_decay(name: str, value: Any) -> tuple[int, float]:
    pair = _to_list(name, value, "(start, factor)")
    if (
        len(pair) != 2
        or not is_whole_number(pair[0])
        or pair[0] < 0
        or not 0 < to_float(pair[1]) < math.inf
    ):
        raise InputError(
            f"{name} is {format_value(value)}; give (start, factor): start is a whole number from "
            "0, factor is a number above 0"
        )
    return int(pair[0]), to_float(pair[1])


def as_callables(name: str, value: Any) -> tuple[Any, ...]:
    """Return the callables in a value, which is a callable or a list of callables. A list that is
    itself callable, such as transformers' processor lists, counts as a list."""
    objects = list(value) if isinstance(value, list | tuple) else [value]
    for each in cast(list[Any], objects):
        if isinstance(each, type) or not callable(each):
            raise InputError(
                f"{name} holds {format_value(each)}; give functions or callables, not classes"
            )
    return tuple(objects)


def as_structured(name: str, value: Any) -> Structured:
    if isinstance(value, Structured):
        return value
    kinds = ", ".join(GRAMMARS)
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in GRAMMARS:
        raise InputError(f"{name} is {format_value(value)}; give a dict with one key of {kinds}")
    kind, grammar = next(iter(cast(Mapping[Grammar, Any], value).items()))
    if kind == "choice":
        strings = as_strings(f"{name}'s choice", grammar)
        if not strings:
            raise InputError(f"{name}'s choice is empty; give one or more strings")
        grammar = json.dumps(strings)
    elif kind == "json_schema" and isinstance(grammar, Mapping | bool):
        try:
            grammar = json.dumps(grammar)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{name}'s json_schema is not valid JSON ({error}); give a JSON schema"
            ) from None
    if not isinstance(grammar, str) or not grammar.strip():
        raise InputError(f"{name}'s {kind} is {format_value(grammar)}; give a non-empty string")
    return Structured(kind, grammar)


class ThinkingBudget(NamedTuple):
    """The maximum number of thinking tokens, counted from `opening`, or from the end of the prompt
    if `opening` is empty. At the limit, the ids of `closing` are forced."""

    tokens: int
    opening: Ids
    closing: Ids


def as_thinking_budget(name: str, value: Any) -> ThinkingBudget:
    parts = _to_list(name, value, "(number of tokens, opening ids, closing ids)")
    if len(parts) != 3 or not is_whole_number(parts[0]) or parts[0] < 0:
        raise InputError(
            f"{name} is {format_value(value)}; give (number of tokens, opening ids, closing ids)"
        )
    opening, closing = (as_ids(name, ids) for ids in parts[1:])
    if not closing:
        raise InputError(f"{name} has no closing ids; give one or more closing ids")
    return ThinkingBudget(int(parts[0]), opening, closing)


GRAMMARS = ("json_schema", "regex", "lark", "choice")
