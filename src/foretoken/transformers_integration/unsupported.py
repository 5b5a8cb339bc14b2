"""Rejects arguments of `generate` that foretoken does not support.

The functions raise a ForeignError with the argument's name, before any forward pass and before
random numbers are drawn, so that `attach` can leave the call to transformers.

`generate` passes one list of processors: processors built from the generation config, then the
user's processors, then processors built for sampling. `find_custom_processors` finds the user's
processors in this list.
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

# Entries of the generation config that are unsupported, in addition to those of `find_unfollowed`,
# with the values that are accepted: transformers' defaults, or off
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

# Remedies for unsupported entries, in addition to leaving them out
ENTRY_REMEDIES = {"guidance_scale": ", and give a guided Speculator: spec.guided(scale, negative)"}

# Arguments of a model's forward that are checked elsewhere or can be ignored
EXPECTED_INPUTS = {
    "attention_mask",
    "decoder_attention_mask",
    "position_ids",
    "past_key_values",
    "cache",  # the name of past_key_values from transformers 5.24 on
    "encoder_outputs",
    "use_cache",
    "logits_to_keep",
}

# Processors that depend on a sequence's own positions, so they are correct if there is no padding
POSITIONAL_CLASSES = {"SuppressTokensAtBeginLogitsProcessor", "WhisperTimeStampLogitsProcessor"}
LIBRARY_PREFIX = "transformers."

# Classes of processors that transformers builds, and the entry of the generation config for each
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

# Processors of transformers that depend neither on positions nor on other sequences
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
    """Return the arguments that transformers' `generate` got but does not pass to a
    custom_generate; {} if the caller is another function.

    caller: The stack frame of the call of the custom_generate.

    CAUTION: these are local variables of another library's function, not an interface. As of 5.23,
    `generate` passes neither the streamer nor the assistant to a custom_generate that is a
    function. Without these arguments, the reader of a streamer would wait forever, and an assistant
    would be ignored silently.
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
    """Raise ForeignError if a Speculator of `target` cannot decode for `model`, or does not support
    `arguments`, the result of `read_withheld_arguments`."""
    network = target.model
    layer = model.get_output_embeddings()
    unlike = layer is not None and len(layer.weight) != target.vocab_size
    unlike = unlike or bool(model.config.is_encoder_decoder) != target.encoder_decoder
    if unlike if network is None else network is not model:
        raise ForeignError(
            f"custom_generate is a Speculator of another model than this {type(model).__name__}; "
            "make a Speculator of this model: foretoken.load(model, draft)"
        )
    if arguments.get("assistant_model") is not None:
        raise ForeignError(
            "assistant_model is given, but a Speculator has its own draft; leave assistant_model "
            "out, or load it as the draft: foretoken.load(model, draft)"
        )
    for name in ("synced_gpus", "encoder_outputs"):
        if arguments.get(name):
            raise ForeignError(f"{name} is given, but is not supported; leave it out")


def require_single_row(streamer: object, rows: int) -> None:
    """Raise ForeignError if there is a streamer and more than one sequence."""
    if streamer is not None and rows > 1:
        raise ForeignError(
            f"a streamer takes one sequence, not {rows}; call generate for each prompt"
        )


def require_supported_config(config: GenerationConfig, inputs: Mapping[str, Any]) -> None:
    """Raise ForeignError if the config has an unsupported entry, or if the call has a KV cache from
    the user. inputs: the arguments of the model's forward."""
    if (config.num_beams or 1) > 1:
        raise ForeignError(
            f"num_beams={config.num_beams} asks for a beam search; give num_beams=1, or use "
            "transformers' own generate"
        )
    unknown = (
        n for n, values in UNSUPPORTED_ENTRIES.items() if getattr(config, n, None) not in values
    )
    if entry := find_unfollowed(config) or next(unknown, None):
        value, remedy = getattr(config, entry), ENTRY_REMEDIES.get(entry, "")
        raise ForeignError(f"{entry}={value!r:.60} is not supported; leave it out{remedy}")
    for name in ("past_key_values", "cache"):
        if getattr(inputs.get(name), "_is_user_defined", False):
            raise ForeignError(f"{name} is given, but foretoken has its own cache; leave it out")


def find_media(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the images and audio among the arguments of a forward, and the arguments that describe
    the media, such as sizes. Raises ForeignError for unsupported arguments."""
    others = {n: x for n, x in inputs.items() if n not in EXPECTED_INPUTS and x is not None}
    media_names = [
        n for n, x in others.items() if not isinstance(x, Tensor) or x.is_floating_point()
    ]
    for name in others:
        if not media_names or name.endswith("embeds"):
            raise ForeignError(f"{name} is given, but is not supported; leave it out")
    return others


def find_custom_processors(prepared: Sequence[Any], built: Sequence[Any]) -> list[Any]:
    """Return the user's own processors, in their order.

    prepared: All processors that `generate` would apply.
    built: The processors that transformers builds from the config alone.

    Raises ForeignError if a user's processor replaces a built one, or comes before a built
    processor that is not for sampling: foretoken runs such built processors before the user's.
    """
    for each in built:
        if type(each).__name__ not in BUILT_CLASSES:
            raise ForeignError(
                f"the model adds its own {type(each).__name__}, which is not supported; use "
                "transformers' own generate"
            )
        if not any(are_alike(each, other) for other in prepared):
            name, entry = type(each).__name__, BUILT_CLASSES[type(each).__name__]
            raise ForeignError(f"{name} is given and {entry} is set; give one of the two")
    processors: list[Any] = []
    unmatched, after = list(built), None
    for each in reversed(prepared):
        if unmatched and are_alike(each, unmatched[-1]):
            after = type(unmatched.pop()).__name__
        elif after in SHAPING_CLASSES:
            raise ForeignError(
                f"{type(each).__name__} would come before {SHAPING_CLASSES[after]}, but this "
                "order is not supported; leave one of the two out"
            )
        else:
            processors.insert(0, each)
    return processors


def are_alike(a: Any, b: Any) -> bool:
    """Return whether two processors have the same class and equal attributes."""
    if type(a) is not type(b) or vars(a).keys() != vars(b).keys():
        return False
    return all(_equal(value, vars(b)[name]) for name, value in vars(a).items())


def _equal(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor) or isinstance(b, Tensor):
        return isinstance(a, Tensor) and isinstance(b, Tensor) and a.equal(b)
    return bool(a == b)


def require_position_free(processors: Sequence[Any], *, padded: bool) -> None:
    """Raise ForeignError for a processor of transformers that depends on the batch's padding or on
    other sequences, since foretoken calls processors with one sequence at a time, without padding.
    padded: whether any prompt of the batch is padded."""
    for each in processors:
        name = type(each).__name__
        alone = name == "RepetitionPenaltyLogitsProcessor" and each.prompt_ignore_length is None
        alone = alone or (name in POSITIONAL_CLASSES and not padded)
        if type(each).__module__.startswith("transformers.") and not (
            name in POSITION_FREE_CLASSES or alone
        ):
            raise ForeignError(
                f"{name} depends on positions in the padded batch, but foretoken calls it with one "
                f"sequence without padding; give {BUILT_CLASSES.get(name, 'your own processor')} "
                "instead, or a single sequence"
            )
