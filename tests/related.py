"""Related work that is not a rule of ours: what tests compare speculative sampling with.

The iterative rejection sampler (appendix A.2) is exact, but decides one token by any number of
draws. The looser criteria of blockwise parallel decoding do not keep the target's text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError, whole
from foretoken.sampling.distributions import sample
from foretoken.sampling.verify import leading, live

ROUNDING = 1e-2  # of the sum of a distribution, in the lowest precision


class Tried(NamedTuple):
    """A token, and how many draws from q it took."""

    token: int
    tries: int


def rejection_sample(p: Tensor, q: Tensor, uniforms: Iterator[float]) -> Tried:
    """Rejection sampling as it is usually meant: draw x from q until r < p(x) / (M q(x)) (appendix
    A.2). One token in the distribution p, by M = max p/q draws on average; p, q `[V]`.

    Two numbers in [0, 1) are taken from `uniforms` for every try. Raises RefusedError where p gives
    a token that q cannot: M is infinite, and no try would ever be kept; InputError for an invalid
    distribution.
    """
    for name, distribution in (("p", p), ("q", q)):
        total = float(distribution.sum())
        if not (bool((distribution >= 0).all()) and abs(total - 1) < ROUNDING):
            raise InputError(f"{name} sums to {total}; give numbers of 0 or more that sum to 1")
    ratio = torch.where(p > 0, q.double() / p.double(), torch.inf)
    least = min(1.0, float(ratio.amin()))  # 1/M
    if not least > 0:
        raise RefusedError("p gives a token that q cannot (M is infinite); give a q that covers p")
    tries = 0
    while True:
        tries += 1
        u, r = next(uniforms), next(uniforms)
        x = int(sample(q[None], torch.tensor([u], dtype=torch.float64)))
        if r * float(q[x]) < float(p[x]) * least:
            return Tried(x, tries)


def blockwise_top_k(logits: Tensor, x: Tensor, lengths: Tensor, k: int) -> Tensor:
    """Blockwise parallel decoding's looser criterion (Stern et al. 2018, arXiv 1811.03115, section
    5.1): n [B], the leading draft tokens that are each among the k likeliest of `logits [B, G+1,
    V]`, the lowest index first on ties.

    Not the target's text, but at k = 1, the exact match: that is `verify.greedy`. InputError where
    a draft token is judged by NaN.
    """
    V = logits.shape[-1]
    if not whole(k) or not 1 <= k <= V:
        raise InputError(f"k is {k!r:.60}; give 1 to {V}, the number of tokens")
    scores, at = logits[:, : x.shape[1]], x[..., None]
    if bool((scores.isnan().any(-1) & live(x, lengths)).any()):
        raise InputError(
            "logits hold NaN, which has no place among the likeliest; look at the model"
        )
    own = scores.gather(2, at)
    ahead = (scores > own) | ((scores == own) & (torch.arange(V, device=x.device) < at))
    return leading(ahead.sum(-1) < k, lengths)


def blockwise_near(best: Tensor, x: Tensor, lengths: Tensor, distance: int) -> Tensor:
    """Its criterion for tokens that are quantities, such as brightness (section 5.2): n [B], the
    leading guesses within `distance` of the argmax `best [B, G+1]`. Not the target's output."""
    if distance < 0:
        raise InputError(f"distance is {distance}; give 0 (exact) or more")
    return leading((best[:, : x.shape[1]] - x).abs() <= distance, lengths)
