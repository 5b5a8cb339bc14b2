"""Acceptance methods that speculative sampling is compared with (paper, appendix A.2).

Both methods preserve the target's distribution, as Algorithm 1 does. The methods accept a draft
token with at most the probability with which Algorithm 1 accepts it; `theory.match_beta` and
`theory.rejection_beta` compute the mean probabilities.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.sampling.acceptance_rules import Outcome, Rule, find_drafted, speculative


def match(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Token matching ("sample and match"): sample y from p at every position, accept draft tokens
    as long as they equal y, and continue with the first y that differs.

    It accepts x with probability p(x), on average sum p q; Algorithm 1 accepts with probability sum
    min(p, q) on average. The code uses Algorithm 1 with q one-hot on x (q = None), which is
    equivalent: given y != x, y has the distribution p without x, normalized.
    """
    return speculative(p, None, x, lengths)


def rejection(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Rejection sampling with a single attempt: accept x with probability p(x) / (M q(x)), M = max
    p/q, else sample from p itself (appendix A.2, "non-iterative").

    On average it accepts a draft token with probability 1/M = min q/p. 1/M is 0 if q is 0 at a
    token with p > 0. So if q is one-hot, a draft token is accepted only if p is one-hot on it.
    """
    G = x.shape[1]
    if q is None:
        q = torch.zeros_like(p[:, :G]).scatter_(2, x[..., None], 1.0)
    at = x[..., None]
    px, qx = (distribution.gather(2, at).squeeze(2).double() for distribution in (p[:, :G], q))
    ratio = px / qx.where(qx > 0, torch.inf)  # a draft token of probability 0 under q is rejected
    accept = (ratio * _min_ratio(p[:, :G], q)).clamp(max=1.0)
    survival = accept.where(find_drafted(x, lengths), 0.0).cumprod(1)
    zeros = q.new_zeros(1).expand(q.shape)  # the residual after a rejection is p itself
    return Outcome(survival, p, zeros, x, lengths, survival.new_ones(len(x), G + 1))


COMPARATORS: dict[str, Rule] = {"match": match, "rejection": rejection}


def _min_ratio(p: Tensor, q: Tensor) -> Tensor:
    """Return 1/M = min q/p over tokens with p > 0, `[...]` in float64."""
    ratio = torch.where(p > 0, q.double() / p.double(), torch.inf)
    return ratio.amin(-1).clamp(max=1.0)  # rounding can exceed 1
