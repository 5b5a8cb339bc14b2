"""Makes attention by latents (MLA: DeepSeek-V2, arXiv 2405.04434, section 2.1) from transformers'
modules. Latents are cached in place of keys and values. The weights that would turn latents into
keys and values are applied to queries and to attention's results instead
(`kernels/cpp/latent.h`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.native.network import (
    RELATIVE_TOLERANCE,
    Attention,
    Latent,
    Linear,
    Rope,
    RowIndices,
    make_random_states,
    pad_head_rows,
    rotate_pairs,
)

if TYPE_CHECKING:
    from foretoken.models.native.network_reader import NetworkReader

ROTARY_FUNCTIONS = "apply_rotary_pos_emb", "apply_rotary_emb"
INTERLEAVED_ROTARY_FUNCTION = "apply_rotary_pos_emb_interleave"
NUM_TRIAL_POSITIONS = 6


def read_latents(reader: NetworkReader, part: Any) -> Attention:
    """Return attention whose keys and values are computed from latents. Raises RefusedError if
    the attention is of a kind that the kernels do not support."""
    rank, rotary_width = int(part.kv_lora_rank), int(part.qk_rope_head_dim)
    inner, width, heads = int(part.qk_nope_head_dim), int(part.v_head_dim), int(part.num_heads)
    reader.require(rank > 0 and rotary_width > 0 and inner > 0, "latents of unknown width")
    reader.require(not reader.has_growing_queries(), "latents with queries scaled by position")
    down = reader.read_linear(part.kv_a_proj_with_mqa)
    fits = len(down.weight) == rank + rotary_width and len(part.kv_b_proj.weight) == heads * (
        inner + width
    )
    reader.require(fits, "latents of another kind")
    own = pad_head_rows(1, rank), pad_head_rows(1, rotary_width, rank)
    both = reader.read_linear(part.kv_b_proj)
    reader.require(both.bias is None, "keys of latents with a bias")
    up = both.weight.reshape(heads, inner + width, rank)
    keys = [
        Linear(np.ascontiguousarray(one[:inner].T))
        .select_outputs(own[0])
        .select_inputs(pad_head_rows(1, inner))
        for one in up
    ]
    values = [Linear(one[inner:]).select_outputs(pad_head_rows(1, width)) for one in up]
    order = _order_outputs(heads, inner, rotary_width)
    narrow = getattr(part, "q_a_proj", None)
    if narrow is None:
        queries, latent = (
            reader.read_linear(part.q_proj).select_outputs(order),
            Latent(rank, keys, values),
        )
    else:
        wide = reader.read_linear(part.q_b_proj)
        query_rank = wide.weight.shape[1]
        queries = reader.read_linear(narrow).select_outputs(pad_head_rows(1, query_rank))
        latent = Latent(rank, keys, values, query_rank, wide.select_outputs(order))
    norm = None if narrow is None else reader.read_norm(part.q_a_layernorm, latent.query_rank)
    rope = (
        reader.add_rope(_infer_rope(reader, part, rotary_width))
        if reader.has_positions(part)
        else None
    )
    out = reader.read_linear(part.o_proj).select_inputs(pad_head_rows(heads, width))
    return Attention(
        [queries, down.select_outputs(np.concatenate(own))],
        out,
        heads,
        1,
        sum(map(len, own)),
        float(part.scaling),
        norms=(norm, reader.read_norm(part.kv_a_layernorm, rank), None),
        rope=rope,
        query_rope=rope,
        latent=latent,
    )


def _order_outputs(heads: int, inner: int, rotary_width: int) -> RowIndices:
    """Return the indices of the query weight's rows, in the kernels' order: for each head the rows
    without rotation, then the rotary rows, both groups padded to full vectors with -1."""
    each = [
        np.concatenate(
            [pad_head_rows(1, inner, start), pad_head_rows(1, rotary_width, start + inner)]
        )
        for start in range(0, heads * (inner + rotary_width), inner + rotary_width)
    ]
    return np.concatenate(each)


def _infer_rope(reader: NetworkReader, part: Any, rotary_width: int) -> Rope:
    """Return rotary positions. They are found by comparing products of queries and keys, because
    some families permute the rotated numbers, which does not change the products."""
    module, rotary = sys.modules[type(part).__module__], reader.find_rotary(part)
    positions = torch.arange(NUM_TRIAL_POSITIONS)
    made = rotary(torch.zeros(1), positions[None])
    queries, keys = make_random_states(2, 1, 1, NUM_TRIAL_POSITIONS, rotary_width)
    named = INTERLEAVED_ROTARY_FUNCTION, *ROTARY_FUNCTIONS
    if not getattr(reader.config, "rope_interleave", True):
        named = named[1:]
    rotate: Any = next((f for name in named if (f := getattr(module, name, None))), None)
    reader.require(rotate is not None, "no known function for rotary positions")
    given = (made,) if isinstance(made, Tensor) else made
    expected = _compute_scores(*rotate(queries, keys, *given))
    scale = float(getattr(rotary, "attention_scaling", 1.0))
    frequencies = rotary.inv_freq.double()
    for interleaved in (False, True):
        rotated = [
            rotate_pairs(x, positions[:, None] * frequencies, scale, interleaved)
            for x in (queries, keys)
        ]
        if torch.allclose(
            _compute_scores(*rotated), expected, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE
        ):
            return Rope(tuple(frequencies.tolist()), scale, interleaved)
    raise reader.make_refusal("rotary positions of another kind")


def _compute_scores(queries: Tensor, keys: Tensor) -> Tensor:
    return queries.double() @ keys.double().transpose(-1, -2)
