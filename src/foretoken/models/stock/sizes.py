"""Sizes of a transformers network: how long its rows may be and how many ids it knows, as its
configuration and its layers say; and a sketch of its weights. Does not run it."""

from __future__ import annotations

import inspect
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError, format_value
from foretoken.models.stock.packed import PackedLinear

if TYPE_CHECKING:  # which takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

CONTEXT_LENGTH_FIELDS = ("max_position_embeddings", "max_seq_len", "max_target_positions")


def get_max_positions(config: PreTrainedConfig) -> int | None:
    """Positions that a stack's configuration speaks of; None: no limit. InputError for fewer than
    one."""
    for name in CONTEXT_LENGTH_FIELDS:
        limit = getattr(config, name, None)
        if isinstance(limit, int) and limit < 1:
            if isinstance(getattr(type(config), name, None), property):
                continue  # the family's own word for no limit, as of XLNet; no file has it
            raise InputError(
                f"{name} is {format_value(limit)} in the model's config; give a whole number "
                "from 1 on"
            )
        if isinstance(limit, int):
            return limit
    return None


def get_context_limit(config: PreTrainedConfig) -> int | None:
    """Positions that a stack has; None: no limit.

    Rotary frequencies that change with the longest text in a batch (dynamic, longrope) would make
    rows depend on each other and on what is cached: such a stack ends where they would change,
    unless a longer text is read again (`get_rope_switch_length`).
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
    """N, for a model whose `generate` reads a longer text again; else None.

    Families with long rope whose `generate` keeps the short factors of what it has read are not
    among them: there a text of more than N tokens depends on how long its prompt was.
    """
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "original_max_position_embeddings", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not (has_long_rope(config) and isinstance(length, int) and isinstance(limit, int)):
        return None
    return length if length < limit and _reencodes_long_sequences(model) else None


def _reencodes_long_sequences(model: PreTrainedModel) -> bool:
    """Tell whether `generate` reads all of a text that gets to the length at which the factors
    change.

    Such a model drops the cache when it prepares its passes, and asks for the whole text;
    Phi-4-multimodal's only drops the cache, and its `generate` goes on from the last token alone.
    """
    prepares = getattr(type(model), "prepare_inputs_for_generation", None)
    code = getattr(inspect.unwrap(prepares) if prepares else None, "__code__", None)
    if code is None or "original_max_position_embeddings" not in code.co_names:
        return False
    return "next_sequence_length" in code.co_consts


def has_long_rope(config: PreTrainedConfig) -> bool:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope"


def get_encoder_limit(model: PreTrainedModel) -> int | None:
    """Tokens that the encoder can read; None: no limit."""
    for name in ("max_encoder_position_embeddings", "max_source_positions"):
        if getattr(model.config, name, None):
            return int(getattr(model.config, name))
    return get_context_limit(model.config.get_text_config(encoder=True))


def takes_ids(model: PreTrainedModel) -> bool:
    """Tell whether a model, or its encoder, reads ids with nothing beside them, such as a picture,
    or the places of words on a page; a model with an adapter for sounds merged does not."""
    needs_more = model.config.model_type == "udop" or getattr(model.config, "adapter_merged", False)
    return model.main_input_name == "input_ids" and not needs_more


def get_encoder_vocab_size(model: PreTrainedModel) -> int:
    """Ids that the encoder knows: some families give it a vocabulary of its own, some read none."""
    if not takes_ids(model):
        return get_output_vocab_size(model)
    encoder: Any = model.get_encoder()
    try:
        return encoder.get_input_embeddings().weight.shape[0]
    except (AttributeError, NotImplementedError):  # an encoder that does not say what it embeds
        config: Any = model.config
        return getattr(config, "src_vocab_size", None) or config.get_text_config().vocab_size


def get_output_vocab_size(model: PreTrainedModel) -> int:
    """Rows of the output layer, padding included. RefusedError where there is none."""
    rows = getattr(model.get_output_embeddings(), "out_features", None)
    rows = rows or getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if rows is None:
        name = f"{model.config.model_type} ({type(model).__name__})"
        raise RefusedError(f"{name} has no output layer of tokens; give a model that writes text")
    return int(rows)


def find_last_kv_layers(config: PreTrainedConfig) -> dict[str, int]:
    """Return the last layer of each kind of attention among those that keep keys: the last layers
    may read others'."""
    kinds: list[str] = getattr(config, "layer_types", None) or []
    keeping = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: j for j, kind in enumerate(kinds[:keeping])}


def make_empty_logits(model: PreTrainedModel, rows: int) -> Tensor:
    """`[rows, 0, V]`."""
    return torch.zeros(
        rows, 0, get_output_vocab_size(model), dtype=model.dtype, device=model.device
    )


SAMPLES_PER_WEIGHT = 16  # values of every weight, evenly spaced
SKETCH_TOLERANCE = 2**-7  # relative: one model in float32, bfloat16 and float16 differs by less


@torch.no_grad()
def sketch_weights(model: PreTrainedModel) -> Tensor:
    """Values of all weights in the order of the modules, `[N]`, float32 on the CPU: they tell
    models apart whatever their precision."""
    parts = (x.unpack() if isinstance(x, PackedLinear) else x for x in model.modules())
    weights = (weight for part in parts for weight in part.parameters(recurse=False))
    return torch.cat([_sample(weight) for weight in weights]).cpu()


def is_same_model(a: Tensor, b: Tensor) -> bool:
    """Tell whether two sketches are of one model."""
    return a.shape == b.shape and torch.allclose(a, b, rtol=SKETCH_TOLERANCE, atol=1e-6)


def _sample(weight: Tensor) -> Tensor:
    steps = torch.arange(SAMPLES_PER_WEIGHT, device=weight.device)
    return weight.flatten()[steps * (weight.numel() - 1) // (SAMPLES_PER_WEIGHT - 1)].float()
