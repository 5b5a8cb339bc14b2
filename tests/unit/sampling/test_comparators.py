"""The comparators' acceptance probabilities are what the formulas say, and never above beta."""

from __future__ import annotations

import itertools
from math import inf, nan

import numpy as np
import pytest
import torch

from foretoken import theory
from foretoken.errors import InputError, RefusedError
from foretoken.sampling.comparators import COMPARATORS, match, rejection
from foretoken.sampling.distributions import likeliest
from foretoken.sampling.verify import greedy
from related import blockwise_near, blockwise_top_k, rejection_sample

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


def test_a_try_of_the_iterative_sampler_has_the_mass_p_over_M():
    """All numbers of a grid on which nothing is rounded: so much mass a try gives each token."""
    p, q = torch.tensor([1, 2, 1, 0.0]) / 4, torch.tensor([2, 1, 4, 1.0]) / 8
    M, kept = 4, np.zeros(4)  # 2/4 against 1/8
    grid = (np.arange(16) + 0.5) / 16
    for u, r in itertools.product(grid, grid):
        try:
            token, tries = rejection_sample(p, q, iter([u, r]))
        except StopIteration:  # not kept: it asks for another try
            continue
        assert tries == 1
        kept[token] += 1 / 16**2
    np.testing.assert_allclose(kept, p.numpy() / M, atol=1e-12)
    assert theory.rejection_beta(p.numpy(), q.numpy()) == 1 / M
    # x = 1 by u .3; a first try at x = 0 is not kept: .25 / (4 * .25) = .25
    assert rejection_sample(p, q, iter([0.0, 0.5, 0.3, 0.9])) == (1, 2)


def test_a_draft_that_does_not_cover_the_target():
    with pytest.raises(RefusedError, match="M is infinite"):
        rejection_sample(torch.tensor([0.5, 0.5]), torch.tensor([1.0, 0.0]), iter([]))


@pytest.mark.parametrize("bad", [[nan, 1.0], [0.0, 0.0], [inf, 0.0], [1.5, -0.5], [1e-30, 0.0]])
def test_what_is_no_distribution_cannot_be_sampled(bad):
    distribution = torch.tensor([0.5, 0.5])
    for p, q, whose in ((bad, distribution, "p"), (distribution, bad, "q")):
        with pytest.raises(InputError, match=f"^{whose} sums to .*; give .* that sum to 1$"):
            rejection_sample(torch.as_tensor(p), torch.as_tensor(q), iter([0.5] * 9))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
def test_of_equals_the_lowest_index_is_the_likelier(dtype):
    """Logits of three values only, so that nearly every position has ties."""
    rng = torch.Generator().manual_seed(0)
    logits = torch.randint(3, (400, 4, 40), generator=rng).to(dtype)
    lengths = torch.randint(4, (400,), generator=rng)
    order = logits.argsort(dim=-1, descending=True, stable=True)
    for k in (1, 2, 7):
        rank = torch.randint(k + 1, (400, 3, 1), generator=rng)  # k: just not among them
        x = order[:, :3].gather(2, rank).squeeze(2)
        live = torch.arange(3) < lengths[:, None]
        n = ((rank.squeeze(2) < k) & live).long().cumprod(1).sum(1)
        assert torch.equal(blockwise_top_k(logits, x, lengths, k), n)
        if k == 1:
            assert torch.equal(greedy(likeliest(logits), x, lengths), n)


def test_nan_has_no_place_among_the_likeliest():
    logits, x = torch.zeros(1, 3, 4), torch.zeros(1, 2, dtype=torch.long)
    logits[0, 1, 2] = nan
    assert blockwise_top_k(logits, x, torch.tensor([1]), 1).tolist() == [1]  # it is in padding
    with pytest.raises(InputError, match="logits hold NaN"):
        blockwise_top_k(logits, x, torch.tensor([2]), 1)


def test_blockwise_criteria():
    logits = torch.tensor([[[3.0, 2, 1, 0], [0, 1, 2, 3], [0, 3, 2, 1], [1, 0, 0, 0]]])
    x, lengths = torch.tensor([[0, 2, 3]]), torch.tensor([3])
    best = logits.argmax(-1)
    exact = greedy(best, x, lengths)
    assert exact.tolist() == blockwise_top_k(logits, x, lengths, 1).tolist() == [1]
    assert blockwise_near(best, x, lengths, 0).tolist() == [1]
    assert blockwise_top_k(logits, x, lengths, 2).tolist() == [2]
    assert blockwise_top_k(logits, x, lengths, 3).tolist() == [3]
    assert blockwise_near(best, x, lengths, 1).tolist() == [2]
    assert blockwise_near(best, x, lengths, 2).tolist() == [3]
    assert blockwise_near(best, x, torch.tensor([2]), 2).tolist() == [2]  # the rest is padding
    for k in 0, 5, 1.5, "2":
        with pytest.raises(InputError, match=f"k is {k!r}; give 1 to 4"):
            blockwise_top_k(logits, x, lengths, k)
    with pytest.raises(InputError, match="distance is -1"):
        blockwise_near(best, x, lengths, -1)
