"""Cache, masks and attention for tracing a block of new tokens over an explicit past.

Attention scores past and new tokens apart and joins the scores, so the past is read in place.
Masks, windows, positions and T5's relative bias follow each row's own length. It does not know
models, inputs or outputs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache

from foretoken.models.stock.attention import RUNNING

HIDDEN = -1e30  # added to scores that must not count; finite in bfloat16 too
Pairs = list[tuple[Tensor, Tensor]]


class Fresh(DynamicCache):
    """A transformers cache without a past, which notes the new keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: Pairs = []  # of the layers that have run

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.fresh)
        self.fresh.append((key_states, value_states))
        return key_states, value_states


class Block(Fresh):
    """New tokens of rows of different lengths, and which keys each of them attends to."""

    def __init__(self, past: Pairs, lengths: Tensor, width: Any) -> None:
        super().__init__()
        self.past, self.lengths = past, lengths
        capacity = past[0][0].shape[2]
        self.positions = lengths[:, None] + torch.arange(width)  # [B, n]: slots too
        slots = torch.arange(capacity).expand(lengths.shape[0], -1)
        self.keys_at = torch.cat([slots, self.positions], 1)  # [B, capacity + n]
        self.filled = torch.cat([slots < lengths[:, None], self.positions >= 0], 1)
        self.capacity, self.width = capacity, width
        self.bias: Tensor | None = None

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.lengths

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.capacity + query_length, 0

    def mask(self, rule: Any, dtype: torch.dtype) -> Tensor:
        """`[B, 1, n, capacity + n]`, to add: the model's rule at each row's own positions."""
        b = torch.arange(self.lengths.shape[0])[:, None, None, None]
        q, kv = self.positions[:, None, :, None], self.keys_at[:, None, None, :]
        return additive(rule(b, b.new_zeros(1, 1, 1, 1), q, kv) & self.filled[:, None, None], dtype)

    def relative(self, module: Any, mask: Tensor) -> Tensor:
        """T5's bias `[B, H, n, capacity + n]` at each row's own distances, with the mask."""
        if module.has_relative_attention_bias:
            buckets = module._relative_position_bucket(
                self.keys_at[:, None, :] - self.positions[:, :, None],
                bidirectional=False,
                num_buckets=module.relative_attention_num_buckets,
                max_distance=module.relative_attention_max_distance,
            )
            self.bias = module.relative_attention_bias(buckets).permute(0, 3, 1, 2) + mask
        assert self.bias is not None
        return self.bias


def explicit_mask(
    *, mask_function: Any, attention_mask: Tensor | None, dtype: torch.dtype, **kwargs: Any
) -> Tensor | None:
    """The mask to add to scores: over past and block, or over a padded source."""
    block: Any = RUNNING.get().cache
    if block is not None and isinstance(kwargs["q_offset"], Tensor):
        return block.mask(mask_function, dtype)
    return None if attention_mask is None else additive(attention_mask[:, None, None, :], dtype)


def explicit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention `[B, n, H, dim]`: of a block over past and itself, or over a source."""
    block: Any = RUNNING.get().cache
    if block is not None and block.fresh and key is block.fresh[-1][0]:
        bias: Any = attention_mask
        if position_bias is not None:
            bias = block.relative(module, bias)
        query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        states = joined(query, block.past[len(block.fresh) - 1], (key, value), bias, softcap)
    else:
        bias = attention_mask
        if position_bias is not None and block is None:  # T5's encoder, before the mask is known
            bias = position_bias if bias is None else position_bias + bias
        states = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return states.transpose(1, 2).contiguous(), None


def joined(
    query: Tensor,
    past: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    bias: Tensor,
    softcap: float | None,
) -> Tensor:
    """Attention `[B, H, n, dim]` over past and new keys without putting them in one tensor.

    Query heads that share keys are stacked as one longer block.
    """
    b, heads, n, dim = query.shape
    key_heads, capacity = past[0].shape[1], past[0].shape[2]
    query = query.reshape(b, key_heads, -1, dim)
    scores = torch.cat([query @ keys.transpose(2, 3) for keys in (past[0], new[0])], -1)
    scores = scores.reshape(b, heads, n, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + bias, -1).reshape(b, key_heads, -1, capacity + n)
    states = weights[..., :capacity] @ past[1] + weights[..., capacity:] @ new[1]
    return states.reshape(b, heads, n, -1)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, 0.0, HIDDEN).to(dtype)


def within(lengths: Tensor, width: Any) -> Tensor:
    """`[B, width]`, True in a row's first lengths[b] places."""
    return torch.arange(width) < lengths[:, None]


AttentionInterface.register("explicit", explicit_attention)
AttentionMaskInterface.register("explicit", explicit_mask)
