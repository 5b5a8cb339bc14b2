"""Losses against naive float64, where they are least, and their gradients also at zeros."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from foretoken.train.distill import LEAST, LOSSES, log_distribution
from oracle import softmax

pytestmark = pytest.mark.daily

B, L, V = 2, 3, 11
every = pytest.mark.parametrize("name", LOSSES)


def logits(seed: int, scale: float = 2.0) -> torch.Tensor:
    random = torch.Generator().manual_seed(seed)
    return scale * torch.randn(B, L, V, generator=random, dtype=torch.float64)


def loss(name: str, target: torch.Tensor, draft: torch.Tensor, T: float = 1.0) -> torch.Tensor:
    return LOSSES[name](log_distribution(target, T), log_distribution(draft, T))


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
def test_least_where_the_distributions_are_equal(name):
    target = logits(1)
    draft = target.clone().requires_grad_()
    value = loss(name, target, draft)
    assert value.abs().max() < 1e-12
    (slope,) = torch.autograd.grad(value.sum(), draft)
    assert slope.abs().max() < 1e-12
    for seed in range(20):
        assert (loss(name, target, target + logits(seed, 0.1)) > 0).all()


@every
def test_neither_a_constant_nor_the_order_of_tokens_matters(name):
    target, draft = logits(1), logits(2)
    value, order = loss(name, target, draft), torch.randperm(V)
    shifted = loss(name, target + 3, draft - 7)
    assert torch.allclose(value, shifted, rtol=0, atol=1e-12)
    turned = loss(name, target[..., order], draft[..., order])
    assert torch.allclose(value, turned, rtol=0, atol=1e-12)
    swapped = loss(name, draft, target)
    assert torch.allclose(value, swapped, atol=1e-12) == (name in ("tv", "nla", "jsd"))


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
        assert (value[0, 0] > 0).all() and value.max() <= -LEAST + 10


@every
def test_nothing_flows_to_a_target_that_was_run_without_gradients(name):
    target, draft = logits(1), logits(2).requires_grad_()
    loss(name, target, draft).sum().backward()
    assert target.grad is None and draft.grad is not None


def test_total_variation_is_what_is_rejected_and_its_gradient_is_known():
    target, draft = logits(1), logits(2).requires_grad_()
    value = loss("tv", target, draft)
    (slope,) = torch.autograd.grad(value.sum(), draft)
    p, q = target.softmax(-1), draft.detach().softmax(-1)
    assert torch.allclose(value, 0.5 * (p - q).abs().sum(-1))
    low = (q < p).double()
    expected = -q * (low - (q * low).sum(-1, keepdim=True))
    assert torch.allclose(slope, expected, rtol=0, atol=1e-12)


def test_the_log_of_alpha_learns_where_total_variation_does_not():
    target, draft = torch.zeros(V), torch.zeros(V)
    target[0], draft[1] = 40.0, 40.0  # they hardly overlap
    slopes = {}
    for name in ("tv", "nla", "kl", "lk"):
        leaf = draft.clone().requires_grad_()
        (slopes[name],) = torch.autograd.grad(loss(name, target, leaf), leaf)
    assert slopes["tv"].abs().max() < 1e-12
    assert all(slopes[name].abs().max() > 0.1 for name in ("nla", "kl", "lk"))


def test_bounds_between_the_losses():
    """-log a >= 1 - a; Pinsker: 1 - alpha <= sqrt(KL / 2); JSD <= log 2 times total variation."""
    for seed in range(30):
        target, draft = logits(seed, 3.0), logits(seed + 100, 3.0)
        values = {name: loss(name, target, draft) for name in LOSSES}
        assert (values["nla"] >= values["tv"]).all()
        assert (values["tv"] <= (values["kl"] / 2).sqrt()).all()
        assert (values["tv"] <= (values["rkl"] / 2).sqrt()).all()
        assert (values["jsd"] <= math.log(2) * values["tv"]).all()
        low, high = (f(values["kl"], values["tv"]) for f in (torch.minimum, torch.maximum))
        assert ((low <= values["lk"]) & (values["lk"] <= high)).all()
