"""The comparators' acceptance probabilities are what the formulas say, and never above beta."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretoken import theory
from foretoken.sampling.comparators import COMPARATORS, match, rejection
from foretoken.sampling.distributions import likeliest

V = 5
FORMULAS = {"match": theory.match_beta, "rejection": theory.rejection_beta}


def distributions(count: int = 40) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    pairs = rng.gamma(0.7, size=(count, 2, V)) + 1e-3
    pairs[0, 1] = pairs[0, 0]
    pairs[1, 1, 2] = 0.0  # p can give it and q cannot
    pairs[2, 0, 2] = 0.0
    pairs /= pairs.sum(-1, keepdims=True)
    return [(p, q) for p, q in pairs]


@pytest.mark.parametrize("rule", COMPARATORS)
def test_the_acceptance_is_the_formulas(rule):
    one = torch.tensor([1])
    for p, q in distributions():
        both = torch.tensor(np.array([[p, p]]))
        accept = [
            float(COMPARATORS[rule](both, torch.tensor(q)[None, None], x, one).survival)
            for x in torch.arange(V).reshape(V, 1, 1)
        ]
        assert q @ accept == pytest.approx(FORMULAS[rule](p, q), abs=1e-12)


def test_neither_keeps_more_than_speculative_sampling():
    """1/M = sum p min(q/p) <= sum p min(1, q/p) = alpha (appendix A.2), and sum p q <= alpha."""
    for p, q in distributions():
        alpha = theory.beta(p, q)
        assert theory.rejection_beta(p, q) <= alpha + 1e-12
        assert theory.match_beta(p, q) <= alpha + 1e-12
    p, q = distributions()[0]
    assert theory.rejection_beta(p, p) == pytest.approx(1) and theory.beta(p, p) == pytest.approx(1)
    assert theory.match_beta(p, p) < 1  # even a draft that is the target misses
    assert theory.rejection_beta(*distributions()[1]) == 0


def test_a_certain_draft_token():
    """Matching keeps it with p(x); rejection only where p is certain too."""
    p = torch.tensor([[[0.5, 0.3, 0.2]] * 2, [[0.0, 1.0, 0.0]] * 2])
    x, lengths = torch.tensor([[1], [1]]), torch.tensor([1, 1])
    np.testing.assert_allclose(match(p, None, x, lengths).survival, [[0.3], [1.0]], atol=1e-7)
    assert rejection(p, None, x, lengths).survival.tolist() == [[0.0], [1.0]]


def test_after_a_rejection_comes_p_itself():
    (p, q), n = distributions()[5], torch.tensor([0])
    both, one = torch.tensor(np.array([[p, p]])), torch.tensor([1])
    outcome = rejection(both, torch.tensor(q)[None, None], torch.tensor([[1]]), one)
    np.testing.assert_allclose(outcome.next_distribution(n)[0], p, atol=1e-12)
    off = match(both, torch.tensor(q)[None, None], torch.tensor([[1]]), one).next_distribution(n)[0]
    left = np.where(np.arange(V) == 1, 0, p)
    np.testing.assert_allclose(off, left / left.sum(), atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_of_equals_the_lowest_index_is_the_likelier(dtype):
    """Logits of three values only, so that nearly every position has ties."""
    logits = torch.randint(3, (400, 4, 40), generator=torch.Generator().manual_seed(0)).to(dtype)
    best = logits.argsort(dim=-1, descending=True, stable=True)[..., 0]
    assert torch.equal(likeliest(logits), best)
