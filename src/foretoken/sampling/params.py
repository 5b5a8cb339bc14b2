"""Sampling params of a request: options of its distribution, its output length, its logits
controls, its stop conditions and its logprobs.

This module does not import torch, because the import takes seconds and errors on the command line
must appear at once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any, NamedTuple, TypedDict, cast

from foretoken.errors import InputError, RefusedError, format_value
from foretoken.sampling.checks import (
    Biases,
    Check,
    Choice,
    Count,
    Ids,
    LogprobsOf,
    Number,
    Sequences,
    Structured,
    ThinkingBudget,
    as_biases,
    as_callables,
    as_decay,
    as_flag,
    as_id,
    as_ids,
    as_logit_bias,
    as_sequences,
    as_strings,
    as_structured,
    as_thinking_budget,
)
from foretoken.sampling.options import (
    ApiField,
    add_args_section,
    check_options,
    get_options,
    option,
)

GREEDY_BELOW = 1e-5  # lower temperatures mean argmax
MAX_NEW_TOKENS = 64
MAX_RETURN_SEQUENCES = 100_000  # per prompt


# checks that several options share
POSITIVE_PENALTY = Number(ge=1e-30, le=1e30, remedy="a number above 0 (1e-30 to 1e30); 1 is off")
FINITE_NUMBER = Number(remedy="a finite number; 0 is off")
PROBABILITY_CUTOFF = Number(ge=0, lt=1, remedy="a number in [0, 1); 0 is off")
PROBABILITY_SHARE = Number(gt=0, le=1, remedy="a number in (0, 1]; 1 is off")
OFF_OR_COUNT = Count(ge=0, remedy="0 (off) or more")
COUNT_FROM_ONE = Count(ge=1, remedy="1 or more")
LOGPROBS_COUNT = Count(ge=0, remedy="0 (only each token's own logprob) or more")


class WarpingParams(NamedTuple):
    """The options that turn logits into a distribution, for `sampling.distributions`."""

    temperature: float
    top_k: int
    top_p: float
    min_p: float
    typical_p: float
    epsilon_cutoff: float
    eta_cutoff: float


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling params of one request, with transformers' names. Objects are hashable, and check
    their values when they are created.

    An option at None takes its value from the model's generation config; if the config has no
    value, the option is off. Numeric options are off at 0 or at 1 (see below), as in transformers.
    Numbers of any type (NumPy's too) are stored as int or float, lists and mappings as tuples.
    docs/controls.md explains each control, and the order in which controls are applied.

    Raises:
        InputError: A value is invalid.
        RefusedError: Two options contradict each other.

    Examples:
        >>> import foretoken
        >>> params = foretoken.SamplingParams(temperature=0.8, top_p=0.9, stop_strings=["\\n\\n"])
        >>> params.greedy, params.top_p
        (False, 0.9)
    """

    temperature: float = option(
        0.0,
        Number(ge=0, remedy="0 (greedy) or more"),
        "Sampling temperature; 0 is greedy.",
        "Sampling",
        api=ApiField("temperature", {"le": 100}),
    )
    top_k: int = option(
        0,
        OFF_OR_COUNT,
        "Sample from this many most probable tokens; 0 is off.",
        "Sampling",
        api=ApiField("top_k", {"ge": -1}),  # vLLM's -1 is off too
    )
    top_p: float = option(
        1.0,
        PROBABILITY_SHARE,
        "Sample from the most probable tokens that together have this probability; 1 is off.",
        "Sampling",
        api="top_p",
    )
    min_p: float = option(
        0.0,
        Number(ge=0, le=1, remedy="a number in [0, 1]; 0 is off"),
        "Sample from tokens with at least this share of the highest probability; 0 is off.",
        "Sampling",
        api="min_p",
    )
    typical_p: float | None = option(
        None,
        PROBABILITY_SHARE,
        "Sample from the most typical tokens that together have this probability; 1 is off.",
        "Sampling",
        aliases=("typical",),
        off=(1.0,),
    )
    epsilon_cutoff: float | None = option(
        None,
        PROBABILITY_CUTOFF,
        "Sample from tokens of at least this probability; 0 is off.",
        "Sampling",
        off=(0.0,),
    )
    eta_cutoff: float | None = option(
        None,
        PROBABILITY_CUTOFF,
        "Like epsilon_cutoff, with a lower cutoff if many tokens are probable; 0 is off.",
        "Sampling",
        off=(0.0,),
    )
    max_new_tokens: int = option(
        MAX_NEW_TOKENS,
        COUNT_FROM_ONE,
        "Maximum number of new tokens per output.",
        "Stop conditions",
        api="max_tokens",
        aliases=("max_tokens", "max_completion_tokens"),
    )
    min_new_tokens: int | None = option(
        None,
        OFF_OR_COUNT,
        "Forbid EOS and stop ids until the output has this many new tokens, and ignore stop "
        "strings within those tokens.",
        "Stop conditions",
        api="min_tokens",
        off=(0,),
    )
    repetition_penalty: float | None = option(
        None,
        POSITIVE_PENALTY,
        "Above 1: tokens of the prompt and the output become less probable.",
        "Penalties and bans",
        api="repetition_penalty",
        aliases=("repeat_penalty",),
        off=(1.0,),
    )
    encoder_repetition_penalty: float | None = option(
        None,
        POSITIVE_PENALTY,
        "Above 1: tokens of the encoder's input (without an encoder: the prompt) become more "
        "probable.",
        "Penalties and bans",
        off=(1.0,),
    )
    presence_penalty: float = option(
        0.0,
        FINITE_NUMBER,
        "Subtract this from the logits of tokens that are in the output.",
        "Penalties and bans",
        api=ApiField("presence_penalty", {"ge": -2, "le": 2}),
    )
    frequency_penalty: float = option(
        0.0,
        FINITE_NUMBER,
        "Subtract this from a token's logit once for each time it is in the output.",
        "Penalties and bans",
        api=ApiField("frequency_penalty", {"ge": -2, "le": 2}),
    )
    no_repeat_ngram_size: int | None = option(
        None,
        OFF_OR_COUNT,
        "Forbid n-grams of this size that occurred before, in the prompt or the output.",
        "Penalties and bans",
        off=(0,),
    )
    encoder_no_repeat_ngram_size: int | None = option(
        None,
        OFF_OR_COUNT,
        "Forbid n-grams of this size of the encoder's input (without an encoder: the prompt).",
        "Penalties and bans",
        off=(0,),
    )
    allowed_token_ids: Ids | None = option(
        None,
        as_ids,
        "Allow only these ids.",
        "Penalties and bans",
        api="allowed_token_ids",
    )
    bad_words_ids: Sequences | None = option(
        None,
        as_sequences,
        "Forbid these sequences of ids: [[5], [6, 7]].",
        "Penalties and bans",
        aliases=("bad_words",),
        off=([],),
    )
    sequence_bias: Biases | None = option(
        None,
        as_biases,
        "Add to the logit of an id that would complete a sequence: [[[6, 7], -2.5]].",
        "Penalties and bans",
        off=({},),
    )
    logit_bias: Biases = option(
        (),
        as_logit_bias,
        'Add to the logits of ids: {"5": -2.5}.',
        "Penalties and bans",
        api="logit_bias",
    )
    suppress_tokens: Ids | None = option(
        None, as_ids, "Forbid these ids.", "Penalties and bans", off=([],)
    )
    begin_suppress_tokens: Ids | None = option(
        None,
        as_ids,
        "Forbid these ids at the beginning of the output.",
        "Penalties and bans",
        off=([],),
    )
    forced_bos_token_id: int | None = option(
        None, as_id, "Force this id after the decoder's start token.", "Penalties and bans"
    )
    forced_eos_token_id: int | None = option(
        None, as_id, "Force this id as the last token before the length limit.", "Stop conditions"
    )
    exponential_decay_length_penalty: tuple[int, float] | None = option(
        None,
        as_decay,
        "START,FACTOR: after START new tokens, each token makes EOS more probable, by FACTOR.",
        "Stop conditions",
        flag="--exponential-decay",  # the full name is too wide for `--help`
        off=(None,),
    )
    remove_invalid_values: bool | None = option(
        None,
        as_flag,
        "Replace NaN and infinite logits by finite numbers.",
        "Penalties and bans",
        off=(False,),
    )
    stop_strings: tuple[str, ...] | None = option(
        None,
        as_strings,
        "End the output at this string; may be repeated.",
        "Stop conditions",
        flag="--stop",
        api="stop",
        aliases=("stop", "stop_sequences"),
        off=([],),
    )
    include_stop_string: bool = option(
        False,
        as_flag,
        "Include the stop string or stop id in the output.",
        "Stop conditions",
        api="include_stop_str_in_output",
    )
    stop_token_ids: Ids = option(
        (), as_ids, "End the output at these ids.", "Stop conditions", api="stop_token_ids"
    )
    ignore_eos: bool = option(
        False, as_flag, "Continue after an end of sequence.", "Stop conditions", api="ignore_eos"
    )
    skip_special_tokens: bool = option(
        True, as_flag, "Leave special tokens out of the text.", None, api="skip_special_tokens"
    )
    thinking_budget: ThinkingBudget | None = option(
        None,
        as_thinking_budget,
        "Maximum number of thinking tokens, and the ids that open and close the thinking: (n, "
        "[...], [...]).",
        None,
    )
    num_return_sequences: int = option(
        1,
        COUNT_FROM_ONE,
        "Outputs per prompt.",
        "Sampling",
        api=ApiField("n", {"le": 128}),
        aliases=("n", "num_samples"),
        one_text=False,
    )
    logprobs: int | None = option(
        None,
        LOGPROBS_COUNT,
        "Log probabilities of the output tokens, and of this many most probable tokens at each "
        "position.",
        "Reported",
        aliases=("top_logprobs",),
        one_text=False,
    )
    logprobs_of: LogprobsOf = option(
        "raw",
        Choice(("raw", "drawn")),
        "Logprobs of the model's logits (raw) or of the distribution that is sampled from (drawn).",
        "Reported",
        one_text=False,
    )
    prompt_logprobs: int | None = option(
        None,
        LOGPROBS_COUNT,
        "Like logprobs, for the prompt's tokens.",
        "Reported",
        api=ApiField("prompt_logprobs", {"le": 20}),
        one_text=False,
    )
    processors: tuple[Any, ...] = option(
        (),
        as_callables,
        "Your own logits processors: functions of ids [1, n] and scores [1, V].",
        None,
        aliases=("logits_processor",),
    )
    stopping: tuple[Any, ...] = option(
        (),
        as_callables,
        "Your own stopping criteria: functions of ids [1, n] and None.",
        None,
        aliases=("stopping_criteria",),
    )
    structured: Structured | None = option(
        None,
        as_structured,
        "Constrain the output to a JSON schema, regular expression, Lark grammar or choice.",
        "Structured output",
        aliases=("response_format", "guided_json"),
    )
    deterministic: bool = option(
        False,
        as_flag,
        "A seed gives the same output, whatever other prompts are in the batch.",
        "Sampling",
        one_text=False,
    )

    def __post_init__(self) -> None:
        check_options(self)
        _require_agreement(self)

    def __repr__(self) -> str:
        """Return the temperature and the fields that differ from their defaults."""
        values = {name: getattr(self, name) for name in SAMPLING_FIELDS}
        changed = (f.name for f in fields(self) if values[f.name] != f.default)
        names = dict.fromkeys(("temperature", *changed))
        return f"SamplingParams({', '.join(f'{name}={values[name]!r}' for name in names)})"

    @property
    def greedy(self) -> bool:
        """True if the temperature means argmax."""
        return self.temperature < GREEDY_BELOW

    @property
    def standard(self) -> WarpingParams:
        """The options that turn logits into a distribution, with the off value in place of None."""
        return WarpingParams(
            self.temperature,
            self.top_k,
            self.top_p,
            self.min_p,
            1.0 if self.typical_p is None else self.typical_p,
            self.epsilon_cutoff or 0.0,
            self.eta_cutoff or 0.0,
        )

    def list_ids(self) -> dict[str, list[int]]:
        """Return the token ids that the options contain, to check them against a vocabulary.

        Returns:
            The ids by name of the option; options without ids are left out.
        """
        ids_of = {
            name: ID_EXTRACTORS[declaration.check](getattr(self, name))
            for name, declaration in SAMPLING_OPTIONS.items()
            if declaration.check in ID_EXTRACTORS and getattr(self, name) is not None
        }
        return {name: ids for name, ids in ids_of.items() if ids}


class Controls(TypedDict, total=False):
    """The fields of `SamplingParams` as keyword arguments, with all types that are accepted."""

    max_new_tokens: int
    min_new_tokens: int | None
    repetition_penalty: float | None
    encoder_repetition_penalty: float | None
    presence_penalty: float
    frequency_penalty: float
    no_repeat_ngram_size: int | None
    encoder_no_repeat_ngram_size: int | None
    allowed_token_ids: Iterable[int] | None
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
    skip_special_tokens: bool
    thinking_budget: tuple[int, Iterable[int], Iterable[int]] | None
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


def gather_params(
    params: SamplingParams | Iterable[SamplingParams] | None,
    controls: Mapping[str, Any],
    prompts: int,
    method: str = "generate",
) -> list[SamplingParams]:
    """Return one SamplingParams per prompt, from `params` or from the keyword arguments `controls`.
    Raises InputError for an unknown keyword, if `params` and `controls` are both given, or if
    `params` is a list of a length other than `prompts`. prompts: number of prompts; method: name of
    the called method, for the message."""
    for name in controls:
        if name not in SAMPLING_FIELDS:
            near = suggest_name(name, SAMPLING_FIELDS)
            remedy = (
                f"did you mean {near}?" if near else f"give one of {', '.join(SAMPLING_FIELDS)}"
            )
            raise InputError(f"{name} is not an option of {method}; {remedy}")
    if params is None:
        return [SamplingParams(**controls)] * prompts
    if controls:
        raise InputError(
            f"params and {', '.join(controls)} are both given; leave out params, or set "
            "the other options in params with dataclasses.replace(params, ...)"
        )
    if isinstance(params, SamplingParams):
        return [params] * prompts
    if not isinstance(params, list | tuple) or not all(
        isinstance(each, SamplingParams) for each in cast(list[Any], params)
    ):
        raise InputError(
            f"params is {format_value(params)}; give a foretoken.SamplingParams, or a list of such"
        )
    if len(params) != prompts:
        raise InputError(
            f"params has {len(params)} entries for {prompts} prompts; give one entry per prompt"
        )
    return list(params)


def _require_agreement(params: SamplingParams) -> None:
    """Raise RefusedError if two options contradict each other, and InputError if
    num_return_sequences is too large."""
    min_new_tokens = params.min_new_tokens or 0
    if min_new_tokens > params.max_new_tokens:
        raise RefusedError(
            f"min_new_tokens={format_value(min_new_tokens)} is above "
            f"max_new_tokens={format_value(params.max_new_tokens)}; lower the minimum"
        ).with_option("min_new_tokens")
    count = format_value(params.num_return_sequences)
    if params.num_return_sequences > MAX_RETURN_SEQUENCES:
        problem = f"num_return_sequences is {count}; give at most {MAX_RETURN_SEQUENCES}"
        raise InputError(problem).with_option("num_return_sequences")
    if params.num_return_sequences > 1 and params.greedy:
        raise RefusedError(
            f"num_return_sequences={count} at temperature 0 gives equal outputs; raise temperature"
        ).with_option("num_return_sequences")
    if params.include_stop_string and not (params.stop_strings or params.stop_token_ids):
        problem = "include_stop_string has no effect; give stop_strings or stop_token_ids"
        raise RefusedError(problem).with_option("include_stop_string")
    if params.structured and params.ignore_eos and not params.stop_token_ids:
        raise RefusedError(
            "structured output ends with an EOS token, which ignore_eos ignores; leave "
            "out ignore_eos"
        ).with_option("ignore_eos")
    if params.logprobs_of != "raw" and params.logprobs is None:
        problem = f"logprobs_of={params.logprobs_of!r} has no effect without logprobs; give both"
        raise RefusedError(problem).with_option("logprobs_of")


SAMPLING_OPTIONS = get_options(SamplingParams)
SamplingParams.__doc__ = add_args_section(SamplingParams.__doc__ or "", SAMPLING_OPTIONS)
SAMPLING_FIELDS = tuple(SAMPLING_OPTIONS)
# options that can be given as a string, unlike callables
TEXT_OPTIONS = tuple(name for name, each in SAMPLING_OPTIONS.items() if each.panel)
FOREIGN_NAMES = {alias: name for name, each in SAMPLING_OPTIONS.items() for alias in each.aliases}
# by the check of an option: a function that returns the ids in the option's value
ID_EXTRACTORS: dict[Check, Callable[[Any], list[int]]] = {
    as_id: lambda value: [value],
    as_ids: list,
    as_thinking_budget: lambda value: [*value.opening, *value.closing],
    as_sequences: lambda value: [token for ids in value for token in ids],
    as_biases: lambda value: [token for ids, _ in value for token in ids],
    as_logit_bias: lambda value: [token for ids, _ in value for token in ids],
}


def suggest_name(name: str, known: Iterable[str]) -> str | None:
    """Return the name in `known` to suggest for an unknown `name`: the option that another library
    calls by this name, else a similar name; None if there is neither."""
    names = list(known)
    alias = FOREIGN_NAMES.get(name)
    near = [alias] if alias in names else get_close_matches(name, names, 1, 0.5)
    return near[0] if near else None
