"""Losses against naive float64, where they are least, and their gradients also at zeros."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from foretoken.train.distill import LOSSES, MIN_LOG_PROB, compute_log_probs
from oracle import softmax

pytestmark = pytest.mark.daily

B, L, V = 2, 3, 11
every = pytest.mark.parametrize("name", LOSSES)


def logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.randn(B, L, V, generator=random, dtype=torch.float64)


def loss(name: str, target: torch.Tensor, draft: torch.Tensor, T: float = 1.0) -> torch.Tensor:
    return LOSSES[name](compute_log_probs(target, T), compute_log_probs(draft, T))


def naive(name: str, p: np.ndarray, q: np.ndarray) -> float:
    """From distributions without zeros."""
    alpha = sum(min(a, b) for a, b in zip(p, q, strict=True))
    kl = sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
    weight = math.exp(-3 * alpha)
    mixed = weight * kl + (1 - weight) * (1 - alpha)
    values = {"kl": kl, "tv": 1 - alpha, "nla": -math.log(alpha), "lk": mixed}
    if name == "rkl":
        return naive("kl", q, p)
    if name == "jsd":
        return (naive("kl", p, (p + q) / 2) + naive("kl", q, (p + q) / 2)) / 2
    return values[name]


@every
@pytest.mark.parametrize("T", [0.5, 1.0, 1.7])
def test_values_are_those_of_the_formula(name, T):
    target, draft = logits(1), logits(2)
    value = loss(name, target, draft, T)
    assert value.shape == (B, L)
    for at in np.ndindex(B, L):
        p, q = (softmax(z[at].numpy() / T) for z in (target, draft))
        assert float(value[at]) == pytest.approx(naive(name, p, q), abs=1e-12)
    half = loss(name, target.bfloat16(), draft.bfloat16())
    assert half.dtype == torch.float32  # whatever precision the models have


@every
def test_values_and_gradients_are_finite_at_zeros(name):
    target, draft = logits(1), logits(2)
    target[..., :4], draft[..., 2:6] = -torch.inf, -torch.inf  # zeros of p, of q and of both
    target[0, 0], draft[0, 0] = -torch.inf, -torch.inf
    target[0, 0, 1], draft[0, 0, 2] = 0.0, 0.0  # nothing in common
    for dtype in (torch.float32, torch.float64):
        leaf = draft.to(dtype).requires_grad_()
        value = loss(name, target.to(dtype), leaf)
        (slope,) = torch.autograd.grad(value.sum(), leaf)
        assert value.isfinite().all() and slope.isfinite().all()
        assert (slope[..., 2:6][draft[..., 2:6].isinf()] == 0).all()
        assert (value[0, 0] > 0).all() and value.max() <= -MIN_LOG_PROB + 10


def test_total_variation_is_what_is_rejected_and_its_gradient_is_known():
    target, draft = logits(1), logits(2).requires_grad_()
    value = loss("tv", target, draft)
    (slope,) = torch.autograd.grad(value.sum(), draft)
    p, q = target.softmax(-1), draft.detach().softmax(-1)
    assert torch.allclose(value, 0.5 * (p - q).abs().sum(-1))
    low = (q < p).double()
    expected = -q * (low - (q * low).sum(-1, keepdim=True))
    assert torch.allclose(slope, expected, rtol=0, atol=1e-12)
