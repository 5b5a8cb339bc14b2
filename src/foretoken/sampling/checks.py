"""Values of wishes as callers give them, checked and brought into one form, which is hashable.

Every check names the control and the remedy. Knows no tensors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, cast

from foretoken.errors import InputError, as_float, real, shown, whole

Ids = tuple[int, ...]
Sequences = tuple[Ids, ...]
Biases = tuple[tuple[Ids, float], ...]
Grammar = Literal["json_schema", "regex", "lark", "choice"]
LogprobsOf = Literal["raw", "drawn"]


class Structured(NamedTuple):
    """What a text must match."""

    kind: Grammar
    grammar: str  # a choice's strings as a JSON list


Check = Callable[[str, Any], Any]


def _number(accepts: Callable[[float], bool], remedy: str) -> Check:
    def check(name: str, value: Any) -> float:
        if not real(value):
            raise InputError(f"{name} is {shown(value)}; give a number")
        number = as_float(value)
        if not accepts(number):
            raise InputError(f"{name} is {number}; give {remedy}")
        return number

    return check


def _count(least: int, remedy: str) -> Check:
    def check(name: str, value: Any) -> int:
        if not whole(value) or value < least:
            advice = remedy if whole(value) else "a whole number"
            raise InputError(f"{name} is {shown(value)}; give {advice}")
        return int(value)

    return check


def _flag(name: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise InputError(f"{name} is {shown(value)}; give True or False")
    return value


def _listed(name: str, value: Any, remedy: str) -> list[Any]:
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        raise InputError(f"{name} is {shown(value)}; give {remedy}")
    return list(cast(Iterable[Any], value))


def _token(name: str, value: Any) -> int:
    if not whole(value) or value < 0:
        raise InputError(f"{name} holds {shown(value)}; give ids, 0 or more")
    return int(value)


def _id(name: str, value: Any) -> int:
    value = _listed(name, value, "one id") if isinstance(value, list | tuple) else [value]
    if len(value) != 1:
        raise InputError(f"{name} is {shown(value)}; give one id")
    return _token(name, value[0])


def _ids(name: str, value: Any) -> Ids:
    return tuple(_token(name, token) for token in _listed(name, value, "a list of ids"))


def _sequence(name: str, value: Any) -> Ids:
    ids = _ids(name, value)
    if not ids:
        raise InputError(f"{name} holds an empty sequence; give one or more ids in each")
    return ids


def _sequences(name: str, value: Any) -> Sequences:
    return tuple(_sequence(name, ids) for ids in _listed(name, value, "a list of lists of ids"))


def _biases(name: str, value: Any) -> Biases:
    """From a mapping, or pairs; an id alone stands for a sequence of one."""
    remedy = "a mapping from ids to numbers"
    pairs = list(value.items()) if isinstance(value, Mapping) else _listed(name, value, remedy)
    biases: dict[Ids, float] = {}
    for pair in pairs:
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise InputError(f"{name} holds {shown(pair)}; give {remedy}")
        ids, bias = pair
        if isinstance(ids, str):  # as JSON's keys are
            if not ids.isascii() or not ids.isdigit():
                raise InputError(f"{name} holds {shown(ids)}; give {remedy}")
            ids = int(ids)
        ids = _sequence(name, [ids] if whole(ids) else ids)
        number = as_float(bias)
        if math.isnan(number) or number == math.inf:
            raise InputError(
                f"{name} adds {shown(bias)} to {shown(list(ids))}; give a finite number"
            )
        biases[ids] = number
    return tuple(biases.items())


def _logit_bias(name: str, value: Any) -> Biases:
    biases = _biases(name, value)
    for ids, _ in biases:
        if len(ids) != 1:
            raise InputError(
                f"{name} holds {shown(list(ids))}; give single ids, or use sequence_bias"
            )
    return biases


def _strings(name: str, value: Any) -> tuple[str, ...]:
    strings = [value] if isinstance(value, str) else _listed(name, value, "a string or a list")
    for string in strings:
        if not isinstance(string, str) or not string:
            raise InputError(f"{name} holds {shown(string)}; give strings that are not empty")
    return tuple(dict.fromkeys(strings))


def _decay(name: str, value: Any) -> tuple[int, float]:
    pair = _listed(name, value, "a start and a factor")
    if len(pair) != 2 or not whole(pair[0]) or pair[0] < 0 or not 0 < as_float(pair[1]) < math.inf:
        raise InputError(
            f"{name} is {shown(value)}; give a start, 0 or more tokens, and a factor above 0"
        )
    return int(pair[0]), as_float(pair[1])


def _objects(name: str, value: Any) -> tuple[Any, ...]:
    """Callables, one or a list of them (transformers' lists are lists, and callable)."""
    objects = list(value) if isinstance(value, list | tuple) else [value]
    for each in cast(list[Any], objects):
        if isinstance(each, type) or not callable(each):
            raise InputError(f"{name} holds {shown(each)}; give objects that can be called")
    return tuple(objects)


def _structured(name: str, value: Any) -> Structured:
    if isinstance(value, Structured):
        return value
    kinds = ", ".join(GRAMMARS)
    if not isinstance(value, Mapping) or len(value) != 1 or next(iter(value)) not in GRAMMARS:
        raise InputError(f"{name} is {shown(value)}; give a dict with one of {kinds}")
    kind, grammar = next(iter(cast(Mapping[Grammar, Any], value).items()))
    if kind == "choice":
        strings = _strings(f"{name}'s choice", grammar)
        if not strings:
            raise InputError(f"{name}'s choice is empty; give one or more strings")
        grammar = json.dumps(strings)
    elif kind == "json_schema" and isinstance(grammar, Mapping | bool):
        try:
            grammar = json.dumps(grammar)
        except (TypeError, ValueError) as error:
            raise InputError(f"{name}'s json_schema is no JSON ({error}); give a schema") from None
    if not isinstance(grammar, str) or not grammar.strip():
        raise InputError(f"{name}'s {kind} is {shown(grammar)}; give its text")
    return Structured(kind, grammar)


def _of(name: str, value: Any) -> LogprobsOf:
    if value not in ("raw", "drawn"):
        raise InputError(f"{name} is {shown(value)}; give 'raw' or 'drawn'")
    return value


GRAMMARS = ("json_schema", "regex", "lark", "choice")
_penalty = _number(lambda x: 1e-30 <= x <= 1e30, "a number above 0, 1 being off (1e-30 to 1e30)")
_added = _number(math.isfinite, "a finite number, 0 being off")
_cutoff = _number(lambda x: 0 <= x < 1, "a number in [0, 1), 0 being off")
_share = _number(lambda x: 0 < x <= 1, "a number in (0, 1], 1 being off")
_off = _count(0, "0 (off) or more")
_some = _count(1, "1 or more")
_reported = _count(0, "0 (the token's own alone) or more")

CHECKS: dict[str, Check] = {
    "temperature": _number(lambda x: 0 <= x < math.inf, "0 (greedy) or more"),
    "top_k": _off,
    "top_p": _share,
    "min_p": _number(lambda x: 0 <= x <= 1, "a number in [0, 1], 0 being off"),
    "typical_p": _share,
    "epsilon_cutoff": _cutoff,
    "eta_cutoff": _cutoff,
    "max_new_tokens": _some,
    "min_new_tokens": _off,
    "repetition_penalty": _penalty,
    "encoder_repetition_penalty": _penalty,
    "presence_penalty": _added,
    "frequency_penalty": _added,
    "no_repeat_ngram_size": _off,
    "encoder_no_repeat_ngram_size": _off,
    "bad_words_ids": _sequences,
    "sequence_bias": _biases,
    "logit_bias": _logit_bias,
    "suppress_tokens": _ids,
    "begin_suppress_tokens": _ids,
    "forced_bos_token_id": _id,
    "forced_eos_token_id": _id,
    "exponential_decay_length_penalty": _decay,
    "remove_invalid_values": _flag,
    "stop_strings": _strings,
    "include_stop_string": _flag,
    "stop_token_ids": _ids,
    "ignore_eos": _flag,
    "num_return_sequences": _some,
    "logprobs": _reported,
    "logprobs_of": _of,
    "prompt_logprobs": _reported,
    "processors": _objects,
    "stopping": _objects,
    "structured": _structured,
    "deterministic": _flag,
}
