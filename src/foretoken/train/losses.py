"""Six distances between the target's law p and the draft's q, to bring q towards p (paper,
section 3.6: custom-made approximation models).

Each takes the logs of both laws, `[..., V]` in float32 or better, and returns a value at every
position, `[...]`; where p carries no gradient, gradients flow to q alone. All have their minimum,
0, at q = p, and are finite everywhere. alpha = sum_x min(p, q) is what speculative decoding keeps
(Corollary 3.6).
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

LEAST = -100.0  # stands for log 0, so that an impossible token costs this, not infinity


def log_law(logits: Tensor, temperature: float) -> Tensor:
    """log softmax(logits / temperature), as tokens are drawn at that temperature, at least LEAST.

    A logit of -inf, an impossible token, gets no gradient. The temperature must be above 0.
    """
    scores = logits if logits.dtype == torch.float64 else logits.float()
    return (scores / temperature).log_softmax(-1).clamp(min=LEAST)


def forward_kl(p: Tensor, q: Tensor) -> Tensor:
    """sum p log(p / q): covers all of the target's support (Hinton et al., arXiv 1503.02531)."""
    return (p.exp() * (p - q)).sum(-1)


def reverse_kl(p: Tensor, q: Tensor) -> Tensor:
    """sum q log(q / p): seeks the target's modes (Gu et al., arXiv 2306.08543)."""
    return (q.exp() * (q - p)).sum(-1)


def jensen_shannon(p: Tensor, q: Tensor) -> Tensor:
    """(KL(p, m) + KL(q, m)) / 2 with m = (p + q) / 2: symmetric, at most log 2 (Agarwal et al.,
    arXiv 2306.13649)."""
    m = torch.logaddexp(p, q) - math.log(2)
    return (forward_kl(p, m) + forward_kl(q, m)) / 2


def total_variation(p: Tensor, q: Tensor) -> Tensor:
    """1 - alpha = 1 - sum min(p, q): the share that is rejected (paper, Theorem 3.5).

    Its gradient in q's logits is -q_j (1[q_j < p_j] - sum_{i: q_i < p_i} q_i): it vanishes where
    the laws hardly overlap, so a cold draft does not learn from it.
    """
    return 1 - torch.minimum(p, q).exp().sum(-1)


def log_alpha(p: Tensor, q: Tensor) -> Tensor:
    """-log alpha: the gradient of total variation times 1 / alpha, which does not vanish."""
    return -torch.minimum(p, q).logsumexp(-1)


def lk(p: Tensor, q: Tensor) -> Tensor:
    """lambda KL(p, q) + (1 - lambda) (1 - alpha), lambda = exp(-3 alpha) a constant: forward KL
    while the laws are apart, total variation once they are near (arXiv 2602.23881)."""
    rejected = total_variation(p, q)
    weight = torch.exp(-3 * (1 - rejected.detach()))
    return weight * forward_kl(p, q) + (1 - weight) * rejected


LOSSES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "kl": forward_kl,
    "rkl": reverse_kl,
    "jsd": jensen_shannon,
    "tv": total_variation,
    "nla": log_alpha,
    "lk": lk,
}
