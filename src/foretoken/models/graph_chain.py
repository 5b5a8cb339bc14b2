"""All draft tokens of a step as one function of fixed shapes, which a CUDA graph can contain.

The first forward pass appends a block of tokens to each sequence, and each later pass appends the
draft token before it. Tokens are chosen between the passes, on the device. Lengths of blocks,
budgets, filters and random numbers differ from step to step, so they are in a tensor: a recording
is valid for any temperature, top-k, top-p and min-p.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from foretoken.models.base import ChainedTokens, TokenChoice
from foretoken.sampling.distributions import locate_on_device, warp_by_tensors

# After a step, a sequence lacks at most two tokens: the last draft token, if it was accepted, and
# the target's own token. Longer blocks occur only after steps without draft tokens
BLOCK_TOKENS = 2
RECORDED_GAMMAS = (1, 2, 3, 4, 6, 8, 12, 16)  # any number above
NO_FILTERS = (1.0, 0, 1.0, 0.0)


class ChainShape(NamedTuple):
    """All that a recorded chain depends on."""

    rows: int
    width: int  # tokens of the padded blocks
    num_tokens: int  # draft tokens of each row
    end: int  # positions that the passes attend to
    sampled: bool  # False: argmax
    ranked: bool  # True if top-k or top-p is on

    def make_buffer(self, device: torch.device) -> Tensor:
        """Return a buffer for the numbers that `pack_numbers` returns."""
        return torch.zeros(self.rows, 6 + self.num_tokens, dtype=torch.float64, device=device)


def round_up_gamma(gamma: int) -> int:
    """Return the smallest recorded number of draft tokens that is at least gamma."""
    return next((n for n in RECORDED_GAMMAS if n >= gamma), gamma)


def is_ranked(choice: TokenChoice) -> bool:
    """Return whether a sequence needs sorted scores, for top-k or top-p."""
    return any(top_k > 0 or top_p < 1 for _, top_k, top_p, _ in choice.filters or ())


def pack_numbers(counts: list[int], budget: list[int], choice: TokenChoice) -> Tensor:
    """Return the numbers of each sequence in one tensor `[B, 6 + G]`, in float64: the length of its
    block, its budget, temperature, top-k, top-p, min-p, and G uniform random numbers."""
    filters = choice.filters or [NO_FILTERS] * len(counts)
    rows = zip(counts, budget, filters, strict=True)
    numbers = torch.tensor([[n, g, *row] for n, g, row in rows], dtype=torch.float64)
    return numbers if choice.numbers is None else torch.cat([numbers, choice.numbers.T], 1)


def chain_passes(
    run_pass: Callable[[Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]],
    ids: Tensor,
    lengths: Tensor,
    numbers: Tensor,
    shape: ChainShape,
    q: Tensor,
    target_ids: Tensor | None,
) -> ChainedTokens:
    """Return the draft tokens of all rows. Entries after a row's last draft token are undefined,
    but valid.

    Args:
        run_pass: Function that runs a forward pass over ids `[rows, n]` after the cached tokens,
            `[rows]`. Its third argument is the hidden states `[rows, n, H]` of the tokens before
            these ids; None for the first pass. Returns logits `[rows, n, Vd]` and hidden states.
        ids: The first blocks, `[rows, width]`, padded on the right.
        lengths: Cached tokens of each row.
        numbers: The result of `pack_numbers`.
        shape: The shape of this chain.
        q: A buffer for the distributions, `[rows, num_tokens, Vd]`; unused if the tokens are not
            sampled.
        target_ids: See `TokenChoice.ids`.
    """
    counts, budget = numbers[:, :2].long().unbind(1)
    filters, uniforms = numbers[:, 2:6], numbers[:, 6:]
    row = torch.arange(shape.rows, device=ids.device)
    last = (counts - 1).clamp(min=0)
    logits, hidden = (x[row, last] for x in run_pass(ids, lengths, None))
    chosen: list[tuple[Tensor, Tensor, Tensor]] = []
    for i in range(shape.num_tokens):
        if i:
            # id 0 where the budget is used up: other ids might leave NaN in the cache
            draft_token = torch.where(budget > i, chosen[-1][0], 0)
            made = run_pass(draft_token[:, None], lengths + counts + (i - 1), hidden[:, None])
            logits, hidden = (x[:, 0] for x in made)
        top = logits.amax(-1)
        logits = torch.where(torch.isfinite(top)[:, None], logits, 0)  # as `mask_invalid`
        if shape.sampled:
            q[:, i] = p = warp_by_tensors(logits, filters, ranked=shape.ranked).softmax(-1)
            draft_token, mass = locate_on_device(p, uniforms[:, i])
        else:
            draft_token, mass = logits.argmax(-1), torch.ones_like(uniforms[:, i])
        draft_token = draft_token if target_ids is None else target_ids[draft_token]
        chosen.append((draft_token, top, mass))
    tokens, tops, masses = (torch.stack(each, 1) for each in zip(*chosen, strict=True))
    return ChainedTokens(tokens, tops, q if shape.sampled else None, masses)


def select_chained(
    chained: ChainedTokens, slots: Tensor | slice, num_tokens: int, choice: TokenChoice
) -> ChainedTokens:
    """Return copies of the first `num_tokens` draft tokens of these slots, with distributions over
    the target's ids."""
    tokens, tops, q, masses = (
        None if x is None else x[slots, :num_tokens].clone() for x in chained
    )
    assert tokens is not None and tops is not None and masses is not None
    if q is not None and choice.ids is not None:
        q = q.new_zeros(*q.shape[:2], choice.V).index_copy_(-1, choice.ids, q)
    elif q is not None and q.shape[-1] < choice.V:
        q = F.pad(q, (0, choice.V - q.shape[-1]))
    return ChainedTokens(tokens, tops, q, masses)
