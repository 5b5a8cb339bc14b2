"""A row's wishes: how long it goes on, what is done to its logits, what ends it, what is reported.

Knows no tensors: a mistake on the command line is reported before torch is imported, which takes
seconds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict, cast

from foretoken.errors import InputError, RefusedError, about, shown
from foretoken.sampling.checks import CHECKS, Biases, Ids, LogprobsOf, Sequences, Structured

GREEDY_BELOW = 1e-5  # the one threshold under which a temperature means argmax
MAX_NEW_TOKENS = 64
MOST_TEXTS = 100_000  # of one prompt


# What other libraries and servers call the same
ELSEWHERE = {
    "stop": "stop_strings",
    "stop_sequences": "stop_strings",
    "max_tokens": "max_new_tokens",
    "max_completion_tokens": "max_new_tokens",
    "n": "num_return_sequences",
    "num_samples": "num_return_sequences",
    "repeat_penalty": "repetition_penalty",
    "typical": "typical_p",
    "top_logprobs": "logprobs",
    "response_format": "structured",
    "guided_json": "structured",
    "logits_processor": "processors",
    "stopping_criteria": "stopping",
    "bad_words": "bad_words_ids",
}


def meant(name: str, known: Iterable[str]) -> str | None:
    """Which known name an unknown one stands for: what others call it, or one that is like it."""
    names = list(known)
    same = ELSEWHERE.get(name)
    near = [same] if same in names else get_close_matches(name, names, 1, 0.5)
    return near[0] if near else None


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
            with about(name):
                object.__setattr__(self, name, check(name, value))
        _agree(self)

    def __repr__(self) -> str:
        """The temperature, and all that differs from the defaults."""
        values = {name: getattr(self, name) for name in FIELDS}
        unlike = (f.name for f in fields(self) if values[f.name] != f.default)
        names = dict.fromkeys(("temperature", *unlike))
        return f"SamplingParams({', '.join(f'{name}={values[name]!r}' for name in names)})"

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
        ids_of = {
            "bad_words_ids": [i for ids in self.bad_words_ids or () for i in ids],
            "sequence_bias": [i for ids, _ in self.sequence_bias or () for i in ids],
            "logit_bias": [i for ids, _ in self.logit_bias for i in ids],
            "suppress_tokens": list(self.suppress_tokens or ()),
            "begin_suppress_tokens": list(self.begin_suppress_tokens or ()),
            "stop_token_ids": list(self.stop_token_ids),
        }
        for name in ("forced_bos_token_id", "forced_eos_token_id"):
            token = getattr(self, name)
            ids_of[name] = [] if token is None else [token]
        return {name: ids for name, ids in ids_of.items() if ids}


class BeamControls(TypedDict, total=False):
    """The fields of `SamplingParams` that a beam search takes, as keywords: it draws nothing, and
    ends by its own rules."""

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


class Controls(BeamControls, total=False):
    """`SamplingParams` as keywords, with what it takes for each."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float | None
    epsilon_cutoff: float | None
    eta_cutoff: float | None
    stop_strings: str | Iterable[str] | None
    include_stop_string: bool
    num_return_sequences: int
    logprobs: int | None
    logprobs_of: LogprobsOf
    prompt_logprobs: int | None
    stopping: Any
    deterministic: bool


def gathered(
    params: SamplingParams | Iterable[SamplingParams] | None,
    controls: Mapping[str, Any],
    prompts: int,
    method: str = "generate",
) -> list[SamplingParams]:
    """One SamplingParams for each of so many prompts. InputError for a control that is unknown
    (`method` has none of that name), for params and controls at once, or for a list of another
    length."""
    for name in controls:
        if name not in FIELDS:
            near = meant(name, FIELDS)
            remedy = f"did you mean {near}?" if near else f"give one of {', '.join(FIELDS)}"
            raise InputError(f"{name} is no option of {method}; {remedy}")
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
            f"min_new_tokens={shown(least)} is above "
            f"max_new_tokens={shown(params.max_new_tokens)}; give at most that"
        ).about("min_new_tokens")
    texts = shown(params.num_return_sequences)
    if params.num_return_sequences > MOST_TEXTS:
        problem = f"num_return_sequences is {texts}; give at most {MOST_TEXTS}"
        raise InputError(problem).about("num_return_sequences")
    if params.num_return_sequences > 1 and params.greedy:
        raise RefusedError(
            f"num_return_sequences={texts} at temperature 0 gives equal "
            "texts; give a temperature, or call beam_search"
        ).about("num_return_sequences")
    if params.include_stop_string and not (params.stop_strings or params.stop_token_ids):
        problem = "include_stop_string has nothing to include; give stop_strings too"
        raise RefusedError(problem).about("include_stop_string")
    if params.structured and params.ignore_eos and not params.stop_token_ids:
        raise RefusedError(
            "structured ends a text with an id that ignore_eos does not heed; leave ignore_eos out"
        ).about("ignore_eos")
    if params.logprobs_of != "raw" and params.logprobs is None:
        problem = f"logprobs_of={params.logprobs_of!r} without logprobs; give their count"
        raise RefusedError(problem).about("logprobs_of")


FIELDS = tuple(field.name for field in fields(SamplingParams))
OPTIONAL = {field.name for field in fields(SamplingParams) if field.default is None}
