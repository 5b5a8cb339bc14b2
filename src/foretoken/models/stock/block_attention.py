"""Attention that reads only the cache blocks that a sequence has, in compiled layers.

A mask over all slots lets every sequence read as many slots as the longest sequence of the batch.
Here each sequence has a list of the blocks that its queries may see, computed from the mask on the
device, in fixed shapes. torch's flex_attention visits only these blocks, and applies the mask
within them. Its sinks are computed as in transformers' `integrations/flex_attention.py`: the output
is scaled by the share that the sink leaves.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from foretoken.errors import RefusedError

KV_BLOCK_SLOTS = 64
QUERY_BLOCK_ROWS = 1 << 16  # all queries of a pass are in one block
# Tiles of the GPU kernels; their defaults may exceed shared memory, or a block of slots
QUERY_TILE_ROWS, MAX_TILE_DIM = 32, 128
MAX_MASK_ENTRIES = (1 << 31) - 1  # kernels index the mask in 32 bits


class VisibleBlocks(NamedTuple):
    """A batch's mask, and the blocks of slots that each sequence sees."""

    mask: Tensor  # [B * q * K], flat: torch's CPU kernel miscomputes indices of several dimensions
    counts: Tensor  # [B, 1, 1]: visible blocks of each sequence
    indices: Tensor  # [B, 1, 1, K / 64]: each sequence's visible blocks first, in order


def find_visible_blocks(mask: Tensor) -> VisibleBlocks:
    """Return the blocks that each sequence sees.

    mask: `[B, 1, q, K]`, with K a multiple of 64; True, or 0 in the additive form, if the query
    attends to the key.
    """
    mask = mask if mask.dtype == torch.bool else mask == 0
    seen = mask.any(-2, keepdim=True).unflatten(-1, (-1, KV_BLOCK_SLOTS)).any(-1)
    indices = seen.byte().argsort(dim=-1, descending=True, stable=True)
    return VisibleBlocks(mask.flatten(), seen.sum(-1, dtype=torch.int32), indices.int())


def compute_block_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    blocks: VisibleBlocks,
    scale: float | None,
    position_bias: Tensor | None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return attention `[B, q, H, dim]` over visible blocks, with the query heads that share keys
    stacked as one longer block. Runs only while torch compiles.

    softcap: bounds the scores to +-softcap by tanh. sinks: `[H]`, a score of each head for a key
    without a value. Raises RefusedError for a position bias.
    """
    if position_bias is not None:
        raise RefusedError("attention by blocks adds no position bias to its scores")
    b, heads, q, dim = query.shape
    key_heads, group, end = key.shape[1], heads // key.shape[1], key.shape[2]
    torch._dynamo.mark_static(query, 0)  # the kernel for few queries needs a fixed batch size
    mask = blocks.mask
    block_mask = BlockMask.from_kv_blocks(
        blocks.counts,
        blocks.indices,
        BLOCK_SIZE=(QUERY_BLOCK_ROWS, KV_BLOCK_SLOTS),
        mask_mod=lambda b, h, i, j: mask[(b * q + i % q) * end + j],
        seq_lengths=(group * q, end),
        compute_q_blocks=False,  # used only by gradients
    )
    score_mod = None
    if softcap is not None:
        score_mod = lambda score, b, h, i, j: softcap * torch.tanh(score / softcap)  # noqa: E731
    states, aux = flex_attention(
        query.reshape(b, key_heads, group * q, dim),
        key,
        value,
        score_mod=score_mod,
        block_mask=block_mask,
        scale=scale,
        kernel_options={
            "BLOCK_M": QUERY_TILE_ROWS,
            "BLOCK_N": KV_BLOCK_SLOTS if dim <= MAX_TILE_DIM else KV_BLOCK_SLOTS // 2,
        },
        return_aux=AuxRequest(lse=sinks is not None),
    )
    if sinks is not None:
        lse: Any = aux.lse
        scores = sinks.float().view(key_heads, group, 1).expand(-1, -1, q).reshape(key_heads, -1)
        states = (states * torch.sigmoid(lse - scores)[..., None]).to(query.dtype)
    return states.reshape(b, heads, q, -1).transpose(1, 2).contiguous()
