"""Sizes of a transformers network: how long its rows may be and how many ids it knows, as its
configuration and its layers say. Does not run it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.errors import RefusedError


def positions(model: PreTrainedModel) -> int | None:
    """Positions that the decoder's configuration speaks of; None: no limit."""
    limit = getattr(model.config.get_text_config(decoder=True), "max_position_embeddings", None)
    return limit if isinstance(limit, int) and limit > 0 else None


def context_limit(config: PreTrainedConfig) -> int | None:
    """Positions that a stack has; None: no limit.

    Rotary frequencies that change with the longest text in a batch (dynamic, longrope) would make
    rows depend on each other and on what is cached: such a stack ends where they would change,
    unless a longer text is read again (`longrope`).
    """
    limit = getattr(config, "max_position_embeddings", None)
    if not isinstance(limit, int) or limit <= 0:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if kind.get("rope_type") in ("dynamic", "longrope"):
            limit = min(limit, kind.get("original_max_position_embeddings") or limit)
    return limit


def encoder_limit(model: PreTrainedModel) -> int | None:
    """Tokens that the encoder can read; None: no limit."""
    for name in ("max_encoder_position_embeddings", "max_source_positions"):
        if getattr(model.config, name, None):
            return int(getattr(model.config, name))
    return context_limit(model.config.get_text_config(encoder=True))


def encoder_rows(model: PreTrainedModel) -> int:
    """Ids that the encoder knows: some families give it a vocabulary of its own."""
    embeddings: Any = model.get_encoder().get_input_embeddings()
    return embeddings.weight.shape[0]


def output_rows(model: PreTrainedModel) -> int:
    """Rows of the output layer, padding included. RefusedError where there is none."""
    rows = getattr(model.get_output_embeddings(), "out_features", None)
    rows = rows or getattr(model.config.get_text_config(decoder=True), "vocab_size", None)
    if rows is None:
        name = f"{model.config.model_type} ({type(model).__name__})"
        raise RefusedError(f"{name} has no output layer of tokens; give a model that writes text")
    return int(rows)


def no_logits(model: PreTrainedModel, rows: int) -> Tensor:
    """`[rows, 0, V]`."""
    return torch.zeros(rows, 0, output_rows(model), dtype=model.dtype, device=model.device)
