"""The rules against the naive oracle, on random distributions with impossible tokens."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import oracle
from foretoken.sampling.acceptance_rules import EXACT_RULES, count_greedy, overlap, speculative

NAIVE = {"speculative": oracle.algorithm1, "block": oracle.block_verification}
B, G, V = 60, 3, 5


def random_distributions(rng: np.random.Generator, *shape: int) -> np.ndarray:
    distributions = rng.gamma(0.5, size=shape) + 1e-9
    gone = rng.random(shape) < 0.3
    gone[..., rng.integers(shape[-1])] = False
    distributions[gone] = 0.0
    return distributions / distributions.sum(-1, keepdims=True)


def batch(seed: int, certain: bool = False, dtype=torch.float64):
    """p, q, x, lengths: draft tokens that q can make, rows of 0..G guesses, junk behind them."""
    rng = np.random.default_rng(seed)
    p, q = random_distributions(rng, B, G + 1, V), random_distributions(rng, B, G, V)
    x = np.array([[rng.choice(V, p=distribution) for distribution in row] for row in q])
    lengths = rng.integers(0, G + 1, size=B)
    if certain:
        q = np.eye(V)[x]
    return (
        torch.tensor(p, dtype=dtype),
        None if certain else torch.tensor(q, dtype=dtype),
        torch.tensor(x),
        torch.tensor(lengths),
    ), q


@pytest.mark.parametrize("certain", [False, True], ids=["q", "q None"])
@pytest.mark.parametrize("name", EXACT_RULES)
def test_verifications_are_the_oracles(name, certain):
    for seed in range(5):
        (p, q, x, lengths), dense = batch(seed, certain)
        outcome = EXACT_RULES[name](p, q, x, lengths)
        n_distribution = outcome.n_distribution
        for b, length in enumerate(lengths.tolist()):
            verifications = NAIVE[name](p[b].numpy(), dense[b], x[b, :length].tolist())
            naive = [weight for weight, _, _ in verifications] + [0.0] * (G - length)
            np.testing.assert_allclose(n_distribution[b], naive, atol=1e-12)
        for k in range(G + 1):
            distributions = outcome.compute_next_distribution(torch.full((B,), k).minimum(lengths))
            for b, length in enumerate(lengths.tolist()):
                verifications = NAIVE[name](p[b].numpy(), dense[b], x[b, :length].tolist())
                weight, _, distribution = verifications[min(k, length)]
                if weight > 1e-9:  # else any distribution will do
                    np.testing.assert_allclose(distributions[b], distribution, atol=1e-9)


@pytest.mark.parametrize("certain", [False, True], ids=["q", "q None"])
@pytest.mark.parametrize("name", EXACT_RULES)
def test_padding_has_no_influence(name, certain):
    (p, q, x, lengths), _ = batch(8, certain)
    live = torch.arange(G) < lengths[:, None]
    clean = EXACT_RULES[name](p, q, x, lengths)
    for junk in 0.0, 7.0, torch.nan, torch.inf:
        pad = p.clone()
        pad[:, 1:] = p[:, 1:].where(live[..., None], junk)
        dirty = EXACT_RULES[name](
            pad, None if q is None else q.where(live[..., None], junk), x.where(live, 0), lengths
        )
        assert torch.equal(clean.survival, dirty.survival)
        for k in range(G + 1):
            n = torch.full((B,), k).minimum(lengths)
            assert torch.equal(
                clean.compute_next_distribution(n), dirty.compute_next_distribution(n)
            )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXACT_RULES)
def test_outcomes_are_distributions(name, dtype):
    (p, q, x, lengths), _ = batch(11, dtype=dtype)
    outcome = EXACT_RULES[name](p, q, x, lengths)
    assert outcome.survival.dtype == torch.float64
    assert bool((outcome.n_distribution >= 0).all())
    assert bool((outcome.survival.diff(dim=1) <= 0).all())
    torch.testing.assert_close(outcome.n_distribution.sum(1), torch.ones(B, dtype=torch.float64))
    for k in range(G + 1):
        distributions = outcome.compute_next_distribution(torch.full((B,), k).minimum(lengths))
        assert bool((distributions >= 0).all())
        torch.testing.assert_close(distributions.sum(1), torch.ones(B, dtype=dtype))


def test_no_draft_token_of_probability_zero_is_kept():
    """Not even by the least uniform there is."""
    (p, q, x, lengths), _ = batch(13)
    px = p[:, :G].gather(2, x[..., None]).squeeze(2)
    for rule in EXACT_RULES.values():
        n = rule(p, q, x, lengths).n(torch.zeros(B, dtype=torch.float64))
        for b in range(B):
            assert bool((px[b, : n[b]] > 0).all())
    impossible = torch.full((1, 2, 2), 0.0, dtype=torch.float64)
    impossible[..., 1] = 1.0
    for rule in EXACT_RULES.values():
        for q in None, torch.full((1, 1, 2), 0.5, dtype=torch.float64):
            outcome = rule(impossible, q, torch.tensor([[0]]), torch.tensor([1]))
            assert outcome.n(torch.zeros(1, dtype=torch.float64)).tolist() == [0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("name", EXACT_RULES)
def test_a_draft_that_is_the_target_is_kept_whole(name, dtype):
    (p, _, _, lengths), _ = batch(14, dtype=dtype)
    x = p[:, :G].argmax(-1)
    outcome = EXACT_RULES[name](p, p[:, :G].clone(), x, lengths)
    n = outcome.n(torch.full((B,), 1 - 2**-53, dtype=torch.float64))
    assert torch.equal(n, lengths)


@pytest.mark.parametrize("name", EXACT_RULES)
def test_distributions_without_a_token_in_common_keep_nothing(name):
    p = torch.zeros(1, 3, 4, dtype=torch.float64)
    q = torch.zeros(1, 2, 4, dtype=torch.float64)
    p[..., :2], q[..., 2:] = 0.5, 0.5
    outcome = EXACT_RULES[name](p, q, torch.tensor([[2, 3]]), torch.tensor([2]))
    assert outcome.n_distribution.tolist() == [[1, 0, 0]]
    assert outcome.compute_next_distribution(torch.tensor([0])).tolist() == [[0.5, 0.5, 0, 0]]
    assert overlap(p, q, torch.tensor([[2, 3]])).tolist() == [[0, 0]]


@pytest.mark.parametrize("name", EXACT_RULES)
def test_where_no_residual_is_left_p_is_the_distribution(name):
    """Only rounding can reject a draft token there."""
    (p, _, _, _), _ = batch(15)
    lengths = torch.full((B,), G)
    outcome = EXACT_RULES[name](p, p[:, :G].clone(), p[:, :G].argmax(-1), lengths)
    for k in range(G):
        assert torch.equal(outcome.compute_next_distribution(torch.full((B,), k)), p[:, k])


def test_a_draft_token_that_q_cannot_make_is_not_kept():
    p = torch.full((1, 2, 2), 0.5, dtype=torch.float64)
    q = torch.tensor([[[0.0, 1.0]]], dtype=torch.float64)
    for rule in EXACT_RULES.values():
        assert rule(p, q, torch.tensor([[0]]), torch.tensor([1])).survival.tolist() == [[0.0]]


def test_greedy_keeps_the_leading_matches():
    best = torch.tensor([[1, 2, 3, 0], [1, 2, 3, 0], [1, 2, 3, 0], [5, 5, 5, 5]])
    x = torch.tensor([[1, 2, 3], [1, 0, 3], [1, 2, 3], [0, 5, 5]])
    assert count_greedy(best, x, torch.tensor([3, 3, 1, 3])).tolist() == [3, 1, 1, 0]
    assert count_greedy(best[:, :1], x[:, :0], torch.zeros(4)).tolist() == [0, 0, 0, 0]


def test_overlap_is_the_chance_of_keeping_a_draft_token():
    """Theorem 3.5: beta = E over x ~ q of min(1, p(x) / q(x)) = sum of min(p, q)."""
    (p, q, _, _), _ = batch(17)
    x = torch.arange(V)[:, None].expand(V, 1)
    for b in range(5):
        args = p[b, :2].expand(V, 2, V), q[b, :1].expand(V, 1, V), x
        accept = speculative(*args, torch.ones(V)).survival[:, 0]
        assert float(q[b, 0] @ accept) == pytest.approx(float(overlap(*args)[0, 0]), abs=1e-12)
