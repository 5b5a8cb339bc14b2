"""Sizes of a transformers model from its config and layers, such as context lengths and vocabulary
sizes, and a sketch of its weights. The model does not run."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError, format_value
from foretoken.models.stock.packed import PackedLinear

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

CONTEXT_LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def get_max_positions(config: PreTrainedConfig) -> int | None:
    """Return the number of positions in the config of an encoder or decoder; None: no limit. Raises
    InputError if the config sets a number below 1."""
    for name in CONTEXT_LENGTH_FIELDS:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit < 1:
            if isinstance(getattr(type(config), name, None), property):
                continue  # the class's own constant for no limit (XLNet), not a user's value
            raise InputError(
                f"{name} is {format_value(limit)} in the model's config; give an integer of 1 or "
                "more"
            )
        if isinstance(limit, int):
            return limit
    return None


def get_context_limit(config: PreTrainedConfig) -> int | None:
    """Return the context length of an encoder or decoder; None: no limit.

    Rotary frequencies that change with the longest sequence of a batch (dynamic, longrope) would
    make sequences depend on each other and on their cached prefixes. The limit is therefore the
    length at which the frequencies change. Only models for which `get_rope_switch_length` is not
    None run longer sequences.
    """
    limit = get_max_positions(config)
    if limit is None:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if kind.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, kind.get("original_max_position_embeddings") or limit)
    return limit


def get_rope_switch_length(model: PreTrainedModel) -> int | None:
    """Return the length N beyond which a model's `generate` recomputes a sequence with the long
    rotary factors; None if `generate` does not recompute it.

    The result is also None for families whose `generate` leaves cached tokens with the short
    factors, since their output beyond N tokens depends on the prompt length.
    """
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "original_max_position_embeddings", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not (has_long_rope(config) and isinstance(length, int) and isinstance(limit, int)):
        return None
    return length if length < limit and _reencodes_long_sequences(model) else None


def _reencodes_long_sequences(model: PreTrainedModel) -> bool:
    """Return whether `generate` recomputes a sequence when its rotary factors change.

    In that case the model's `prepare_inputs_for_generation` drops the cache and takes all tokens.
    The method of Phi-4-multimodal drops the cache but does not take all tokens, so its `generate`
    continues from the last token only.
    """
    prepares = getattr(type(model), "prepare_inputs_for_generation", None)
    code = getattr(inspect.unwrap(prepares) if prepares else None, "__code__", None)
    if code is None or "original_max_position_embeddings" not in code.co_names:
        return False
    return "next_sequence_length" in code.co_consts


def has_long_rope(config: PreTrainedConfig) -> bool:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope"


def get_encoder_limit(model: PreTrainedModel) -> int | None:
    """Return the encoder's context length in tokens; None: no limit."""
    for name in ("max_encoder_position_embeddings", "max_source_positions"):
        if getattr(model.config, name, None):
            return int(getattr(model.config, name))
    return get_context_limit(model.config.get_text_config(encoder=True))


def takes_ids(model: PreTrainedModel) -> bool:
    """Return whether a model, or its encoder, needs token ids only. False for models that need an
    image, boxes of words on a page (UDOP), or audio (a model with a merged adapter)."""
    needs_more = model.config.model_type == "udop" or getattr(model.config, "adapter_merged", False)
    return model.main_input_name == "input_ids" and not needs_more


def get_encoder_vocab_size(model: PreTrainedModel) -> int:
    """Return the encoder's vocabulary size, which may differ from the decoder's. If the encoder
    takes no ids, return the decoder's."""
    if not takes_ids(model):
        return get_output_vocab_size(model)
    encoder: Any = model.get_encoder()
    try:
        return encoder.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):  # the encoder does not expose its embeddings
        config: Any = model.config
        return getattr(config, "src_vocab_size", None) or config.get_text_config().vocab_size


def get_output_vocab_size(model: PreTrainedModel) -> int:
    """Return the output layer's size with padding. Raises RefusedError if this is unknown."""
    size = getattr(model.get_output_embeddings(), "out_features", None)
    size = size or getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if size is None:
        name = f"{model.config.model_type} ({type(model).__name__})"
        raise RefusedError(f"{name} has no output layer; give a model with a language model head")
    return int(size)


def find_last_kv_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return, for each attention kind, the last layer that has its own KV cache; the model's last
    layers may use the KV cache of earlier layers instead."""
    kinds: list[str] = getattr(config, "layer_types", None) or []
    keeping = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: j for j, kind in enumerate(kinds[:keeping])}


def make_empty_logits(model: PreTrainedModel, rows: int) -> Tensor:
    """Return empty logits `[rows, 0, V]`."""
    return torch.zeros(
        rows, 0, get_output_vocab_size(model), dtype=model.dtype, device=model.device
    )


SAMPLES_PER_WEIGHT = 16  # values of every weight, evenly spaced
# relative; float32, bfloat16 and float16 versions of one model differ by less
SKETCH_TOLERANCE = 2**-7


@torch.no_grad()
def sketch_weights(model: PreTrainedModel) -> Tensor:
    """Return a few values of every weight, in module order, `[N]`, in float32 on the CPU. These
    values identify a model that is loaded in any precision (`is_same_model`)."""
    parts = (x.unpack() if isinstance(x, PackedLinear) else x for x in model.modules())
    weights = (weight for part in parts for weight in part.parameters(recurse=False))
    return torch.cat([_sample(weight) for weight in weights]).cpu()


def is_same_model(a: Tensor, b: Tensor) -> bool:
    """Return whether two sketches (`sketch_weights`) come from the same weights, except for
    rounding to another precision."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=SKETCH_TOLERANCE, atol=1e-6)


def _sample(weight: Tensor) -> Tensor:
    steps = torch.arange(SAMPLES_PER_WEIGHT, device=weight.device)
    return weight.flatten()[steps * (weight.numel() - 1) // (SAMPLES_PER_WEIGHT - 1)].float()
