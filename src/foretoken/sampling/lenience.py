"""Lenience (paper, appendix A.5): the acceptance test uses l q in place of q, with l <= 1. More
draft tokens are accepted, but the output does not have the target's distribution.

Accepting x with probability min(1, p(x) / (l q(x))), and else sampling from norm((p - q)+), is
exact speculative decoding for another distribution than p,

    P_l = min(q, p / l) + (1 - alpha_l) norm((p - q)+),    alpha_l = sum min(q, p / l),

so any exact rule becomes lenient with P_l in place of p. No probability exceeds
max(p, min(q, p / l)), hence none exceeds p / l, and the total variation distance from p is
alpha_l - alpha. The paper does not specify the residual; no other residual gives a distribution
nearer to p at these acceptance probabilities. The token after a fully accepted block has
distribution p.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from foretoken import argument_checks
from foretoken.sampling.acceptance_rules import Outcome, Rule, find_drafted


def make_lenient(rule: Rule, lenience: float) -> Rule:
    """Return the lenient version of an exact rule. The lenient rule verifies against P_l in place
    of p, and returns an outcome whose `p` is P_l.

    With Algorithm 1, this is the paper's lenience. With block verification, the output tokens at
    draft positions have distribution P_l too, and more draft tokens are accepted.
    """
    argument_checks.check_lenience(lenience)

    def judge_leniently(p: Tensor, q: Tensor | None, x: Tensor, lengths: Tensor) -> Outcome:
        G = x.shape[1]
        drafted = find_drafted(x, lengths)[..., None]
        P = torch.where(drafted, compute_lenient_distribution(p[:, :G], q, x, lenience), p[:, :G])
        return rule(torch.cat([P, p[:, G:]], 1), q, x, lengths)

    return judge_leniently


def compute_lenient_distribution(p: Tensor, q: Tensor | None, x: Tensor, lenience: float) -> Tensor:
    """Return P_l at every draft token, `[B, G, V]`, from p and q of the same shape. q None: one-hot
    on x `[B, G]`."""
    if q is None:
        at = x[..., None]
        px = p.gather(2, at)
        accepted = (px / lenience).clamp(max=1)  # alpha_l; below 1 only if 1 - p(x) > 1 - l
        scale = (1 - accepted) / (1 - px).clamp(min=max(1 - lenience, math.ulp(1.0)))
        return (p * scale).scatter(2, at, accepted)
    accepted_mass = torch.minimum(q, p / lenience)
    residual = (p - q).clamp(min=0)
    mass = residual.sum(-1, keepdim=True)
    scale = (1 - accepted_mass.sum(-1, keepdim=True)).clamp(min=0) / mass.where(mass > 0, 1.0)
    return accepted_mass + residual * scale


def find_near_best(logits: Tensor, lenience: float) -> Tensor:
    """Return a mask `[..., V]` of the tokens that greedy lenience accepts: p >= l max p (the paper
    prints the inequality the wrong way round). p is the softmax of the logits, without sampling
    params."""
    scores = logits.to(torch.promote_types(logits.dtype, torch.float32))
    return scores >= scores.amax(-1, keepdim=True) + math.log(lenience)
