"""Rejects arguments of `generate` that foretoken does not support, naming each.

Everything refused is a ForeignError and is told before a row runs or a number is drawn, so that
`attach` can leave the call to transformers.

Some of the processors that transformers prepared are the user's own. By then both are in one list:
first what the generation config asks for, then the user's, then what sampling adds. Processors
that the config explains are translated (`generate_call`); the rest is passed on.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import FrameType
from typing import TYPE_CHECKING, Any

from torch import Tensor

from foretoken.errors import ForeignError
from foretoken.generation_config import find_unfollowed
from foretoken.models.base import Model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Entries that nothing here follows beside NOT_FOLLOWED, and the values at which that is
# no loss: transformers' defaults, or off
UNSUPPORTED_ENTRIES: dict[str, tuple[Any, ...]] = {
    "output_attentions": (None, False),
    "output_hidden_states": (None, False),
    "use_mtp": (None, False),
    "assistant_early_exit": (None,),
    "assistant_ensemble_weight": (None,),
    "speculation_type": (None,),
    "num_assistant_tokens_schedule": (None, "constant"),
    "assistant_confidence_threshold": (None, 0.0, 0.4),
    "assistant_lookbehind": (None, 10),
    "target_lookbehind": (None, 10),
    "max_matching_ngram_size": (None, 2),
}

# More to say of an entry that is left out
ENTRY_REMEDIES = {"guidance_scale": ", and give a guided Speculator: spec.guided(scale, negative)"}

# Arguments of a model's forward that are not read here, or are checked
EXPECTED_INPUTS = {
    "attention_mask",
    "decoder_attention_mask",
    "position_ids",
    "past_key_values",
    "cache",  # its name from transformers 5.24 on
    "encoder_outputs",
    "use_cache",
    "logits_to_keep",
}

# Those that count a row's places, and look at no other row: right where no row is padded
POSITIONAL_CLASSES = {"SuppressTokensAtBeginLogitsProcessor", "WhisperTimeStampLogitsProcessor"}
LIBRARY_PREFIX = "transformers."  # modules of it


# Classes that transformers builds, and the entry of the generation config that it is built from
SHAPING_CLASSES = {
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
WARPER_CLASSES = {
    "TemperatureLogitsWarper": "temperature",
    "TopKLogitsWarper": "top_k",
    "TopPLogitsWarper": "top_p",
    "MinPLogitsWarper": "min_p",
    "TypicalLogitsWarper": "typical_p",
    "EpsilonLogitsWarper": "epsilon_cutoff",
    "EtaLogitsWarper": "eta_cutoff",
    "LogitNormalization": "renormalize_logits",
}
BUILT_CLASSES = SHAPING_CLASSES | WARPER_CLASSES

# Classes of transformers that read neither a token's place nor another row: right without padding
POSITION_FREE_CLASSES = {
    *WARPER_CLASSES,
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


def read_withheld_arguments(caller: FrameType | None) -> dict[str, Any]:
    """Read the arguments that transformers' `generate` got and does not pass on.

    CAUTION: this reads the local variables of another library's function, which is no interface.
    To a decoding method that is a callable, `generate` passes neither streamer nor assistant (as of
    5.23): a streamer would wait for its end forever, and an assistant would be left out
    without a word. Where the caller is another function, nothing is read, and {} is returned.
    """
    module = "" if caller is None else str(caller.f_globals.get("__name__"))
    if (
        caller is None
        or caller.f_code.co_name != "generate"
        or not module.startswith(LIBRARY_PREFIX)
    ):
        return {}
    names = ("streamer", "assistant_model", "synced_gpus")
    values = {name: caller.f_locals.get(name) for name in names}
    return values | {"encoder_outputs": caller.f_locals.get("kwargs", {}).get("encoder_outputs")}


def require_same_model(model: PreTrainedModel, target: Model, arguments: Mapping[str, Any]) -> None:
    """ForeignError where a Speculator cannot decode for this model; `arguments`: as
    `read_withheld_arguments`."""
    network = target.model
    layer = model.get_output_embeddings()
    unlike = layer is not None and len(layer.weight) != target.vocab_size
    unlike = unlike or bool(model.config.is_encoder_decoder) != target.encoder_decoder
    if unlike if network is None else network is not model:
        raise ForeignError(
            f"custom_generate is a Speculator of another model than this {type(model).__name__}; "
            "make one of it: foretoken.load(model, draft)"
        )
    if arguments.get("assistant_model") is not None:
        raise ForeignError(
            "assistant_model is given, but a Speculator has its own draft; leave it out, or make "
            "one with it: foretoken.load(model, draft)"
        )
    for name in ("synced_gpus", "encoder_outputs"):
        if arguments.get(name):
            raise ForeignError(f"{name} is given, which is not followed here; leave it out")


def require_single_row(streamer: object, rows: int) -> None:
    """ForeignError for a streamer of several rows."""
    if streamer is not None and rows > 1:
        raise ForeignError(f"a streamer takes one row, not {rows}; call generate for each")


def require_supported_config(config: GenerationConfig, inputs: Mapping[str, Any]) -> None:
    """ForeignError for an entry of the config that is not followed, or a cache."""
    if (config.num_beams or 1) > 1:
        raise ForeignError(
            f"num_beams={config.num_beams} asks for a beam search; give num_beams=1, or leave "
            "it to transformers' own generate"
        )
    unknown = (
        n for n, values in UNSUPPORTED_ENTRIES.items() if getattr(config, n, None) not in values
    )
    if entry := find_unfollowed(config) or next(unknown, None):
        value, remedy = getattr(config, entry), ENTRY_REMEDIES.get(entry, "")
        raise ForeignError(f"{entry}={value!r:.60} is not followed here; leave it out{remedy}")
    for name in ("past_key_values", "cache"):
        if getattr(inputs.get(name), "_is_user_defined", False):
            raise ForeignError("a cache is given; rows have one of their own: leave it out")


def find_media(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pictures and sounds among a forward's arguments, and what is told of them, such as
    sizes. ForeignError for arguments that are not followed."""
    others = {n: x for n, x in inputs.items() if n not in EXPECTED_INPUTS and x is not None}
    media_names = [
        n for n, x in others.items() if not isinstance(x, Tensor) or x.is_floating_point()
    ]
    for name in others:
        if not media_names or name.endswith("embeds"):
            raise ForeignError(f"{name} is given, which is not followed here; leave it out")
    return others


def find_custom_processors(prepared: Sequence[Any], built: Sequence[Any]) -> list[Any]:
    """The user's own processors, in their order. `built`: what transformers builds from the config
    alone.

    ForeignError where one took the place of a built one, or stands before one that shapes: ours
    come after those.
    """
    for each in built:
        if type(each).__name__ not in BUILT_CLASSES:
            raise ForeignError(
                f"the model adds a {type(each).__name__} of its own, which is not followed here"
            )
        if not any(are_alike(each, other) for other in prepared):
            name, entry = type(each).__name__, BUILT_CLASSES[type(each).__name__]
            raise ForeignError(f"{name} is given, and {entry} is set too; give one of the two")
    processors: list[Any] = []
    unmatched, after = list(built), None
    for each in reversed(prepared):
        if unmatched and are_alike(each, unmatched[-1]):
            after = type(unmatched.pop()).__name__
        elif after in SHAPING_CLASSES:
            raise ForeignError(
                f"{type(each).__name__} would come before {SHAPING_CLASSES[after]}, an order "
                "that is not "
                "followed here; leave one of the two out"
            )
        else:
            processors.insert(0, each)
    return processors


def are_alike(a: Any, b: Any) -> bool:
    """Tell whether two processors are of one class and hold the same values."""
    if type(a) is not type(b) or vars(a).keys() != vars(b).keys():
        return False
    return all(_equal(value, vars(b)[name]) for name, value in vars(a).items())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.equal(b)
    return bool(a == b)


def require_position_free(processors: Sequence[Any], *, padded: bool) -> None:
    """ForeignError for a processor of transformers that was made for a batch with padding: it is
    called with one row without. padded: whether there is any."""
    for each in processors:
        name = type(each).__name__
        alone = name == "RepetitionPenaltyLogitsProcessor" and each.prompt_ignore_length is None
        alone = alone or (name in POSITIONAL_CLASSES and not padded)
        if type(each).__module__.startswith("transformers.") and not (
            name in POSITION_FREE_CLASSES or alone
        ):
            raise ForeignError(
                f"{name} counts a batch's places, and rows run alone, without padding; give "
                f"{BUILT_CLASSES.get(name, 'a processor of your own')} instead, or one row"
            )
