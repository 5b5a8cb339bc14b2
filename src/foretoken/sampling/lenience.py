"""Lenience (appendix A.5): draft tokens are compared with l q in place of q. Faster, and not exact.

Accepting x with probability min(1, p(x) / (l q(x))) and replacing it by a draw from norm((p - q)+)
is exact speculative decoding to a distribution of its own,

    P_l = min(q, p / l) + (1 - alpha_l) norm((p - q)+),    alpha_l = sum min(q, p / l),

so any exact rule is made lenient by giving it P_l in place of p. No token is above
max(p, min(q, p / l)), hence none above p / l, and the total variation from p is alpha_l - alpha.
The paper leaves the residual open; with these acceptances none is nearer to p. The token after a
block that was kept whole has the distribution p. Knows no models and draws nothing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken import argument_checks
from foretoken.sampling.acceptance_rules import Outcome, Rule, draft_mask


def make_lenient(rule: Rule, lenience: float) -> Rule:
    """`rule`, which must be exact, judging by P_l: its outcome's `p` says so.

    Made of Algorithm 1 this is the paper's; made of block verification it has P_l at every draft
    token too, and keeps more.
    """
    argument_checks.check_lenience(lenience)

    def judge_leniently(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        G = x.shape[1]
        drafted = draft_mask(x, lengths)[..., None]
        P = torch.where(drafted, lenient_distribution(p[:, :G], q, x, lenience), p[:, :G])
        return rule(torch.cat([P, p[:, G:]], 1), q, x, lengths)

    return judge_leniently


def lenient_distribution(p: Tensor, q: Tensor | None, x: Tensor, lenience: float) -> Tensor:
    """P_l at every draft token, `[B, G, V]`, from p and q of that shape; q None: all of it on x
    `[B, G]`."""
    if q is None:
        at = x[..., None]
        px = p.gather(2, at)
        accepted = (px / lenience).clamp(max=1)  # alpha_l; below 1 only where 1 - p(x) > 1 - l
        scale = (1 - accepted) / (1 - px).clamp(min=max(1 - lenience, math.ulp(1.0)))
        return (p * scale).scatter(2, at, accepted)
    accepted_mass = torch.minimum(q, p / lenience)
    residual = (p - q).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    scale = (1 - accepted_mass.sum(-1, keepdim=True)).clamp(min=0) / mass.where(mass > 0, 1.0)
    return accepted_mass + residual * scale


def near_best(logits: Tensor, lenience: float) -> Tensor:
    """Where p >= l max p, `[..., V]`: what greedy lenience accepts (the paper's inequality is
    printed the wrong way round). p is the softmax of the logits, whatever the call asks for."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scores >= scores.amax(-1, keepdim=True) + math.log(lenience)
