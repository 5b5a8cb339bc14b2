"""The two additions of DFlash2 to a block drafter's network: layers with convolutions over the
block's positions, and a selector that chooses each draft token among the most probable ones, given
the token before it.

There is no paper. The definitions are those of vLLM (qwen3_dflash2.py, pull request 52816) and of
vllm-project/speculators (models/dflash2), whose authors took them from z-lab's code.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer


class GroupedConvolution(nn.Module):
    """A causal convolution before a sublayer and another one after it, both over the positions of
    a block. Their weights depend on the sublayer's input x:

    out[i, c] = sum over t < taps of (base[t, c] + delta[i, t, group of channel c]) * x[i - t, c],

    where x is 0 before the block's first position, and `kernel_projection` computes the deltas of
    both convolutions from x[i].
    """

    def __init__(self, hidden: int, taps: int, group_size: int) -> None:
        super().__init__()
        self.base_kernel = nn.Parameter(torch.zeros(2, taps, hidden))
        self.kernel_projection = nn.Linear(hidden, 2 * taps * (hidden // group_size), bias=False)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        """Return the convolved output of `sublayer` on the convolved input x `[B, n, H]`."""
        taps = self.base_kernel.shape[1]
        deltas = self.kernel_projection(x).unflatten(-1, (2, taps, -1))
        x = sublayer(_convolve(x, self.base_kernel[0], deltas[:, :, 0]))
        return _convolve(x, self.base_kernel[1], deltas[:, :, 1])


def _convolve(x: Tensor, base: Tensor, deltas: Tensor) -> Tensor:
    """Convolve x `[B, n, H]` with base `[taps, H]` plus deltas `[B, n, taps, groups]`."""
    group_size = x.shape[-1] // deltas.shape[-1]
    out = torch.zeros_like(x)
    for t in range(len(base)):
        earlier = functional.pad(x, (0, 0, t, 0))[:, : x.shape[1]]
        out += (base[t] + deltas[:, :, t].repeat_interleave(group_size, -1)) * earlier
    return out


class ConvolutionLayer(Qwen3DecoderLayer):
    """A layer of Qwen3 with convolutions around its attention and its MLP."""

    def __init__(self, config: Qwen3Config, index: int, taps: int, group_size: int) -> None:
        super().__init__(config, index)
        self.attention_conv = GroupedConvolution(config.hidden_size, taps, group_size)
        self.mlp_conv = GroupedConvolution(config.hidden_size, taps, group_size)

    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self, hidden_states: Tensor, **options: Any
    ) -> Tensor:
        """Return the layer's output `[B, n, H]`; the options are those of its attention."""
        x = hidden_states
        x = x + self.attention_conv(
            self.input_layernorm(x), lambda inside: self.self_attn(inside, **options)[0]
        )
        return x + self.mlp_conv(self.post_attention_layernorm(x), self.mlp)


class CandidateSelector(nn.Module):
    """Reranks the `top_k` most probable draft tokens at a position. The score of a candidate c
    after the token p is its logit + sum(A[p] * project(hidden state) * B[c]), where A and B are
    tables `[V, rank]`.

    The published drafter scores all pairs of candidates of neighbouring positions, then walks along
    the block and samples each token from the scores after the token before it. This is the same
    chain, with the scores computed only for the tokens on it.

    logit_scale, softcap: Applied to the logits first: cap * tanh(scale * logit / cap); a softcap of
    0 only scales.
    """

    def __init__(
        self,
        vocab_size: int,
        hidden: int,
        rank: int,
        top_k: int,
        logit_scale: float = 1.0,
        softcap: float = 0.0,
    ) -> None:
        super().__init__()
        self.top_k, self.logit_scale, self.softcap = top_k, logit_scale, softcap
        self.predecessor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.successor_codebook = nn.Parameter(torch.zeros(vocab_size, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def forward(self, states: Tensor, logits: Tensor, tokens: Tensor) -> Tensor:
        """Return the logits `[B, V]` of the draft token that follows tokens `[B]`: the scores of
        the candidates, and -inf for all other tokens.

        states, logits: Hidden states `[B, H]` and logits `[B, V]` at the draft token.
        """
        dtype = torch.promote_types(logits.dtype, torch.float32)
        values, ids = (logits.to(dtype) * self.logit_scale).topk(self.top_k)
        if self.softcap:
            values = self.softcap * torch.tanh(values / self.softcap)
        gate = self.predecessor_codebook[tokens] * self.hidden_projection(states)
        scores = values + (gate[:, None] * self.successor_codebook[ids]).to(dtype).sum(-1)
        none = torch.full_like(logits, -torch.inf, dtype=dtype)
        return none.scatter(-1, ids, scores)
