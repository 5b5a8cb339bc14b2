"""Attention by latents (DeepSeek-V2, arXiv 2405.04434, section 2.1), read from transformers'
modules. Keys and values of heads are products of latents; the products that make them go to the
queries and to what heads attend to, so that latents are cached (`kernels/cpp/latent.h`)."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.native.network import (
    SAME,
    Attention,
    Latent,
    Linear,
    Rope,
    Rows,
    padded,
    random_states,
    turn_pairs,
)

if TYPE_CHECKING:
    from foretoken.models.native.reading import NetworkReader

TURNS = "apply_rotary_pos_emb", "apply_rotary_emb"  # functions that turn queries and keys
INTERLEAVED = "apply_rotary_pos_emb_interleave"
PLACES = 6  # positions at which these are tried


def read_latents(reader: NetworkReader, part: Any) -> Attention:
    """Return attention whose keys and values are products of latents."""
    rank, turned = int(part.kv_lora_rank), int(part.qk_rope_head_dim)
    inner, width, heads = int(part.qk_nope_head_dim), int(part.v_head_dim), int(part.num_heads)
    reader.require(rank > 0 and turned > 0 and inner > 0, "latents of no known width")
    reader.require(not reader.queries_grow(), "queries that grow, of latents")
    down = reader.linear(part.kv_a_proj_with_mqa)
    fits = len(down.weight) == rank + turned and len(part.kv_b_proj.weight) == heads * (
        inner + width
    )
    reader.require(fits, "latents of another kind")
    own = padded(1, rank), padded(1, turned, rank)
    both = reader.linear(part.kv_b_proj)
    reader.require(both.bias is None, "keys of latents with a bias")
    up = both.weight.reshape(heads, inner + width, rank)
    keys = [
        Linear(np.ascontiguousarray(one[:inner].T)).rows(own[0]).columns(padded(1, inner))
        for one in up
    ]
    values = [Linear(one[inner:]).rows(padded(1, width)) for one in up]
    order = _order(heads, inner, turned)
    narrow = getattr(part, "q_a_proj", None)
    if narrow is None:
        queries, latent = reader.linear(part.q_proj).rows(order), Latent(rank, keys, values)
    else:
        wide = reader.linear(part.q_b_proj)
        query_rank = wide.weight.shape[1]
        queries = reader.linear(narrow).rows(padded(1, query_rank))
        latent = Latent(rank, keys, values, query_rank, wide.rows(order))
    norm = None if narrow is None else reader.norm(part.q_a_layernorm, latent.query_rank)
    rope = reader.add_rope(_rope(reader, part, turned)) if reader.has_positions(part) else None
    out = reader.linear(part.o_proj).columns(padded(heads, width))
    return Attention(
        [queries, down.rows(np.concatenate(own))],
        out,
        heads,
        1,
        sum(map(len, own)),
        float(part.scaling),
        norms=(norm, reader.norm(part.kv_a_layernorm, rank), None),
        rope=rope,
        query_rope=rope,
        latent=latent,
    )


def _order(heads: int, inner: int, turned: int) -> Rows:
    """Return the outputs of heads' queries: those that are not turned, then those that are, each
    in full vectors."""
    each = [
        np.concatenate([padded(1, inner, start), padded(1, turned, start + inner)])
        for start in range(0, heads * (inner + turned), inner + turned)
    ]
    return np.concatenate(each)


def _rope(reader: NetworkReader, part: Any, turned: int) -> Rope:
    """Return rotary positions, which are tried by products of queries and keys: some families
    leave what they turned in another order."""
    module, rotary = sys.modules[type(part).__module__], reader.rotary_of(part)
    places = torch.arange(PLACES)
    made = rotary(torch.zeros(1), places[None])
    queries, keys = random_states(2, 1, 1, PLACES, turned)
    named = INTERLEAVED, *TURNS
    if not getattr(reader.config, "rope_interleave", True):
        named = named[1:]
    turn: Any = next((f for name in named if (f := getattr(module, name, None))), None)
    reader.require(turn is not None, "rotary positions by no known function")
    given = (made,) if isinstance(made, Tensor) else made
    expected = _scores(*turn(queries, keys, *given))
    scale = float(getattr(rotary, "attention_scaling", 1.0))
    frequencies = rotary.inv_freq.double()
    for interleaved in (False, True):
        own = [
            turn_pairs(x, places[:, None] * frequencies, scale, interleaved)
            for x in (queries, keys)
        ]
        if torch.allclose(_scores(*own), expected, rtol=SAME, atol=SAME):
            return Rope(tuple(frequencies.tolist()), scale, interleaved)
    raise reader.refused("rotary positions of another kind")


def _scores(queries: Tensor, keys: Tensor) -> Tensor:
    return queries.double() @ keys.double().transpose(-1, -2)
