"""Rules that speculative sampling is compared with (appendix A.2), under their own names.

Both keep the target's distribution, as Algorithm 1 does, and never keep more draft tokens than it.
How likely each keeps a draft token: `theory.match_beta`, `theory.rejection_beta`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.sampling.acceptance_rules import Outcome, Rule, draft_mask, speculative


def match(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Token matching ("sample and match"): y is drawn from p at every position, and draft tokens
    are kept as long as they equal it; the first y that differs follows them.

    A guess is kept with probability p(x), sum p q on average, against sum min(p, q). It is
    Algorithm 1 told that every draft token was certain: given y != x, its distribution is p without
    x.
    """
    return speculative(p, None, x, lengths)


def rejection(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
    """Rejection sampling with a single try: keep x with probability p(x) / (M q(x)), M = max p/q,
    and else draw from p itself (appendix A.2, "non-iterative").

    A guess is kept with probability 1/M = min q/p: never where p gives a token that q cannot, so
    a certain draft token only where p is certain too.
    """
    G = x.shape[1]
    if q is None:
        q = torch.zeros_like(p[:, :G]).scatter_(2, x[..., None], 1.0)
    at = x[..., None]
    px, qx = (distribution.gather(2, at).squeeze(2).double() for distribution in (p[:, :G], q))
    ratio = px / qx.where(qx > 0, torch.inf)  # a draft token that q cannot make is not kept
    accept = (ratio * _min_ratio(p[:, :G], q)).clamp(max=1.0)
    survival = accept.where(draft_mask(x, lengths), 0.0).cumprod(1)
    nothing = q.new_zeros(1).expand(q.shape)  # is taken from p after a rejection
    return Outcome(survival, p, nothing, x, lengths, survival.new_ones(len(x), G + 1))


COMPARATORS: dict[str, Rule] = {"match": match, "rejection": rejection}


def _min_ratio(p: Tensor, q: Tensor) -> Tensor:
    """1/M = min q/p over what p can give, `[...]` in float64."""
    ratio = torch.where(p > 0, q.double() / p.double(), torch.inf)
    return ratio.amin(-1).clamp(max=1.0)  # but for rounding
