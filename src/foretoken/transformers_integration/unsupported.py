"""Rejects arguments of `generate` that foretoken does not support, naming each.

Everything refused is a ForeignError and is told before a row runs or a number is drawn, so that
`attach` can leave the call to transformers."""

from __future__ import annotations

from collections.abc import Mapping
from types import FrameType
from typing import TYPE_CHECKING, Any

from foretoken.errors import ForeignError
from foretoken.generation_config import NOT_FOLLOWED
from foretoken.models.base import Model

if TYPE_CHECKING:
    from transformers import GenerationConfig, PreTrainedModel

# Entries that nothing here follows beside NOT_FOLLOWED, and the values at which that is
# no loss: transformers' defaults, or off
UNKNOWN: dict[str, tuple[Any, ...]] = {
    "constraints": (None,),
    "force_words_ids": (None,),
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

# What a model's forward would be given, and is not read here, or is checked
EXPECTED = {
    "attention_mask",
    "decoder_attention_mask",
    "position_ids",
    "past_key_values",
    "cache",  # its name from transformers 5.24 on
    "encoder_outputs",
    "use_cache",
    "logits_to_keep",
}

LIBRARY = "transformers."  # modules of it


def withheld(caller: FrameType | None) -> dict[str, Any]:
    """Read the arguments that transformers' `generate` got and does not pass on.

    CAUTION: this reads the local variables of another library's function, which is no interface.
    To a decoding method that is a callable, `generate` passes neither streamer nor assistant (as of
    5.23): a streamer would wait for its end forever, and an assistant would be left out
    without a word. Where the caller is another function, nothing is read, and {} is returned.
    """
    module = "" if caller is None else str(caller.f_globals.get("__name__"))
    if caller is None or caller.f_code.co_name != "generate" or not module.startswith(LIBRARY):
        return {}
    names = ("streamer", "assistant_model", "synced_gpus")
    values = {name: caller.f_locals.get(name) for name in names}
    return values | {"encoder_outputs": caller.f_locals.get("kwargs", {}).get("encoder_outputs")}


def require_ours(model: PreTrainedModel, target: Model, arguments: Mapping[str, Any]) -> None:
    """ForeignError where a Speculator cannot decode for this model; `arguments`: as `withheld`."""
    network = getattr(target, "model", None)
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


def require_alone(streamer: object, rows: int) -> None:
    """ForeignError for a streamer of several rows."""
    if streamer is not None and rows > 1:
        raise ForeignError(f"a streamer takes one row, not {rows}; call generate for each")


def require_known(config: GenerationConfig, inputs: Mapping[str, Any]) -> None:
    """ForeignError for an entry of the config, or an input of the model, that is not followed."""
    if (config.num_beams or 1) > 1:
        raise ForeignError(
            f"num_beams={config.num_beams} asks for a beam search; call the Speculator's "
            "beam_search, or give num_beams=1"
        )
    for entry, values in (NOT_FOLLOWED | UNKNOWN).items():
        value = getattr(config, entry, None)
        if value not in values:
            raise ForeignError(f"{entry}={value!r:.60} is not followed here; leave it out")
    if config.cache_implementation == "quantized":
        raise ForeignError("cache_implementation='quantized' changes the law; leave it out")
    for name in ("past_key_values", "cache"):
        if getattr(inputs.get(name), "_is_user_defined", False):
            raise ForeignError("a cache is given; rows have one of their own: leave it out")
    for name, value in inputs.items():
        if name not in EXPECTED and value is not None:
            raise ForeignError(f"{name} is given, which is not followed here; leave it out")
