"""Which of the processors that transformers prepared are the user's own.

By then both are in one list: first what the generation config asks for, then the user's, then what
sampling adds. What the config explains is translated (`handed`); the rest is passed on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from foretoken.errors import ForeignError

# What transformers builds, and the entry of the generation config that it is built from
SHAPING = {
    "SequenceBiasLogitsProcessor": "sequence_bias",
    "EncoderRepetitionPenaltyLogitsProcessor": "encoder_repetition_penalty",
    "RepetitionPenaltyLogitsProcessor": "repetition_penalty",
    "NoRepeatNGramLogitsProcessor": "no_repeat_ngram_size",
    "EncoderNoRepeatNGramLogitsProcessor": "encoder_no_repeat_ngram_size",
    "NoBadWordsLogitsProcessor": "bad_words_ids",
    "MinLengthLogitsProcessor": "min_length",
    "MinNewTokensLengthLogitsProcessor": "min_new_tokens",
    "ForcedBOSTokenLogitsProcessor": "forced_bos_token_id",
    "ForcedEOSTokenLogitsProcessor": "forced_eos_token_id",
    "InfNanRemoveLogitsProcessor": "remove_invalid_values",
    "ExponentialDecayLengthPenalty": "exponential_decay_length_penalty",
    "SuppressTokensLogitsProcessor": "suppress_tokens",
    "SuppressTokensAtBeginLogitsProcessor": "begin_suppress_tokens",
}
LAST = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "LogitNormalization": "renormalize_logits",
}
BUILT = SHAPING | LAST

# Classes of transformers that read neither a token's place nor another row: right without padding
ANYWHERE = {
    *LAST,
    "TopHLogitsWarper",
    "SequenceBiasLogitsProcessor",
    "NoRepeatNGramLogitsProcessor",
    "NoBadWordsLogitsProcessor",
    "PrefixConstrainedLogitsProcessor",
    "ForcedBOSTokenLogitsProcessor",
    "InfNanRemoveLogitsProcessor",
    "SuppressTokensLogitsProcessor",
    "WatermarkLogitsProcessor",
}


def given(prepared: Sequence[Any], built: Sequence[Any]) -> list[Any]:
    """The user's own processors, in their order. `built`: what transformers builds from the config
    alone.

    ForeignError where one took the place of a built one, or stands before one that shapes: ours
    come after those.
    """
    for each in built:
        if type(each).__name__ not in BUILT:
            raise ForeignError(
                f"the model adds a {type(each).__name__} of its own, which is not followed here"
            )
        if not any(alike(each, other) for other in prepared):
            name, entry = type(each).__name__, BUILT[type(each).__name__]
            raise ForeignError(f"{name} is given, and {entry} is set too; give one of the two")
    processors: list[Any] = []
    unmatched, after = list(built), None
    for each in reversed(prepared):
        if unmatched and alike(each, unmatched[-1]):
            after = type(unmatched.pop()).__name__
        elif after in SHAPING:
            raise ForeignError(
                f"{type(each).__name__} would come before {SHAPING[after]}, an order that is not "
                "followed here; leave one of the two out"
            )
        else:
            processors.insert(0, each)
    return processors


def alike(a: Any, b: Any) -> bool:
    """Tell whether two processors are of one class and hold the same values."""
    if type(a) is not type(b) or vars(a).keys() != vars(b).keys():
        return False
    return all(_equal(value, vars(b)[name]) for name, value in vars(a).items())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.equal(b)
    return bool(a == b)


def require_anywhere(own: Sequence[Any]) -> None:
    """ForeignError for a processor of transformers that was made for a batch with padding: it is
    called with one row without."""
    for each in own:
        name = type(each).__name__
        alone = name == "RepetitionPenaltyLogitsProcessor" and each.prompt_ignore_length is None
        if type(each).__module__.startswith("transformers.") and not (name in ANYWHERE or alone):
            raise ForeignError(
                f"{name} counts a batch's places, and rows run alone, without padding; give "
                f"{BUILT.get(name, 'a processor of your own')} instead, or one row"
            )
