"""A row's wishes: how long it goes on, what is done to its logits, what ends it, what is reported.

Knows no tensors: a mistake on the command line is reported before torch is imported, which takes
seconds.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, Literal, NamedTuple, TypedDict, cast

from foretoken.errors import InputError, RefusedError, as_float, real, shown, whole

GREEDY_BELOW = 1e-5  # the one threshold under which a temperature means argmax
MAX_NEW_TOKENS = 64

Ids = tuple[int, ...]
Sequences = tuple[Ids, ...]
Biases = tuple[tuple[Ids, float], ...]
Grammar = Literal["json_schema", "regex", "lark", "choice"]
LogprobsOf = Literal["raw", "drawn"]


class Structured(NamedTuple):
    """What a text must match."""

    kind: Grammar
    grammar: str  # a choice's strings as a JSON list


class Standard(NamedTuple):
    """How logits become a law: what `sampling.distributions.law` reads."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """One row's wishes, in transformers' names; checked when made, hashable.

    Where None is the default, None means what the model's generation config says, else off. For
    numbers 0 or 1 switches a control off, as in transformers. Whole numbers and fractions of any
    kind are taken, and kept as int and float; lists and mappings are kept as tuples. What each
    control does, and in which order: docs/controls.md.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float | None = None
    epsilon_cutoff: float | None = None
    eta_cutoff: float | None = None
    max_new_tokens: int = MAX_NEW_TOKENS
    min_new_tokens: int | None = None
    repetition_penalty: float | None = None
    encoder_repetition_penalty: float | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    no_repeat_ngram_size: int | None = None
    encoder_no_repeat_ngram_size: int | None = None
    bad_words_ids: Sequences | None = None
    sequence_bias: Biases | None = None
    logit_bias: Biases = ()
    suppress_tokens: Ids | None = None
    begin_suppress_tokens: Ids | None = None
    forced_bos_token_id: int | None = None
    forced_eos_token_id: int | None = None
    exponential_decay_length_penalty: tuple[int, float] | None = None
    remove_invalid_values: bool | None = None
    stop_strings: tuple[str, ...] | None = None
    include_stop_string: bool = False
    stop_token_ids: Ids = ()
    ignore_eos: bool = False
    num_return_sequences: int = 1
    logprobs: int | None = None
    logprobs_of: LogprobsOf = "raw"
    prompt_logprobs: int | None = None
    processors: tuple[Any, ...] = ()
    stopping: tuple[Any, ...] = ()
    structured: Structured | None = None
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name, check in CHECKS.items():
            value = getattr(self, name)
            if value is None and name in OPTIONAL:
                continue
            object.__setattr__(self, name, check(name, value))
        _agree(self)

    def __repr__(self) -> str:
        """The temperature, and all that differs from the defaults."""
        shown = {name: getattr(self, name) for name in FIELDS}
        unlike = (f.name for f in fields(self) if shown[f.name] != f.default)
        names = dict.fromkeys(("temperature", *unlike))
        return f"SamplingParams({', '.join(f'{name}={shown[name]!r}' for name in names)})"

    @property
    def greedy(self) -> bool:
        return self.temperature < GREEDY_BELOW

    @property
    def standard(self) -> Standard:
        return Standard(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            1.0 if self.typical_p is None else self.typical_p,
            self.epsilon_cutoff or 0.0,
            self.eta_cutoff or 0.0,
        )

    def ids(self) -> dict[str, list[int]]:
        """All ids that it names and that a text can hold, by the control that names them."""
        named = {
            "bad_words_ids": [i for ids in self.bad_words_ids or () for i in ids],
            "sequence_bias": [i for ids, _ in self.sequence_bias or () for i in ids],
            "logit_bias": [i for ids, _ in self.logit_bias for i in ids],
            "suppress_tokens": list(self.suppress_tokens or ()),
            "begin_suppress_tokens": list(self.begin_suppress_tokens or ()),
            "stop_token_ids": list(self.stop_token_ids),
        }
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            token = getattr(self, name)
            named[name] = [] if token is None else [token]
        return {name: ids for name, ids in named.items() if ids}


class Controls(TypedDict, total=False):
    """`SamplingParams` as keywords, with what it takes for each."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    max_new_tokens: int
    min_new_tokens: int | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: Iterable[Iterable[int]] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Iterable[tuple[Iterable[int], float]] | None
    logit_bias: Mapping[int, float]
    suppress_tokens: Iterable[int] | None
    begin_suppress_tokens: Iterable[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    exponential_decay_length_penalty: tuple[int, float] | None
    remove_invalid_values: bool | None
    stop_strings: str | Iterable[str] | None
    include_stop_string: bool
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    num_return_sequences: int
    logprobs: int | None
    logprobs_of: LogprobsOf
    prompt_logprobs: int | None
    processors: Any
    stopping: Any
    structured: Mapping[str, Any] | None
    deterministic: bool


class BeamControls(TypedDict, total=False):
    """Those of them that a beam search takes: it draws nothing, and ends by its own rules."""

    max_new_tokens: int
    min_new_tokens: int | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    bad_words_ids: Iterable[Iterable[int]] | None
    sequence_bias: Mapping[tuple[int, ...], float] | Iterable[tuple[Iterable[int], float]] | None
    logit_bias: Mapping[int, float]
    suppress_tokens: Iterable[int] | None
    begin_suppress_tokens: Iterable[int] | None
    forced_bos_token_id: int | None
    forced_eos_token_id: int | None
    exponential_decay_length_penalty: tuple[int, float] | None
    remove_invalid_values: bool | None
    stop_token_ids: Iterable[int]
    ignore_eos: bool
    processors: Any
    structured: Mapping[str, Any] | None


def gathered(
    params: SamplingParams | Iterable[SamplingParams] | None,
    controls: Mapping[str, Any],
    prompts: int,
) -> list[SamplingParams]:
    """One SamplingParams for each of so many prompts. InputError for an unknown control, for params
    and controls at once, or for a list of another length."""
    for name in controls:
        if name not in FIELDS:
            near = get_close_matches(name, FIELDS, 1, 0.5)
            remedy = f"did you mean {near[0]}?" if near else f"give one of {', '.join(FIELDS)}"
            raise InputError(f"{name} is no option of generate; {remedy}")
    if params is None:
        return [SamplingParams(**controls)] * prompts
    if controls:
        raise InputError(
            f"params and {', '.join(controls)} are both given; give the one or the other, or "
            "dataclasses.replace(params, ...)"
        )
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if not isinstance(params, list | tuple) or not all(
        isinstance(each, SamplingParams) for each in cast(list[Any], params)
    ):
        raise InputError(f"params is {shown(params)}; give a foretoken.SamplingParams, or a list")
    if len(params) != prompts:
        raise InputError(f"params has {len(params)} entries for {prompts} prompts; give one each")
    return list(params)


def _agree(params: SamplingParams) -> None:
    """RefusedError for two wishes that contradict one another."""
    least = params.min_new_tokens or 0
    if least > params.max_new_tokens:
        raise RefusedError(
            f"min_new_tokens={least} is above max_new_tokens={params.max_new_tokens}; "
            "give at most that"
        )
    if params.num_return_sequences > 1 and params.greedy:
        raise RefusedError(
            f"num_return_sequences={params.num_return_sequences} at temperature 0 gives equal "
            "texts; give a temperature, or call beam_search"
        )
    if params.include_stop_string and not (params.stop_strings or params.stop_token_ids):
        raise RefusedError("include_stop_string has nothing to include; give stop_strings too")
    if params.logprobs_of != "raw" and params.logprobs is None:
        raise RefusedError(f"logprobs_of={params.logprobs_of!r} without logprobs; give their count")


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
            given = remedy if whole(value) else "a whole number"
            raise InputError(f"{name} is {shown(value)}; give {given}")
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
        if isinstance(ids, str) and ids.isascii() and ids.isdigit():  # JSON's keys are strings
            ids = int(ids)
        ids = _sequence(name, [ids] if whole(ids) else ids)
        number = as_float(bias)
        if math.isnan(number) or number == math.inf:
            raise InputError(f"{name} adds {shown(bias)} to {list(ids)}; give a finite number")
        biases[ids] = number
    return tuple(biases.items())


def _logit_bias(name: str, value: Any) -> Biases:
    biases = _biases(name, value)
    for ids, _ in biases:
        if len(ids) != 1:
            raise InputError(f"{name} holds {list(ids)}; give single ids, or use sequence_bias")
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
_penalty = _number(lambda x: 0 < x < math.inf, "a number above 0, 1 being off")
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
FIELDS = tuple(field.name for field in fields(SamplingParams))
OPTIONAL = {field.name for field in fields(SamplingParams) if field.default is None}
