"""Odds of counts and of uniform numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy import stats

from foretoken.measurement.estimate import (
    TEST_POWER,
    chi_square_tail,
    compute_noncentrality,
    compute_uniforms,
    normal_tails,
    run_correlation_test,
    run_frequency_test,
    run_two_sample_test,
    run_uniformity_test,
)
from foretoken.sampling.distributions import sample

LEVEL = 1e-5


def numbers(n: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@pytest.mark.parametrize("dof", [1, 7, 160])
def test_tails_are_scipys(dof):
    for x in (0.0, 0.5, dof, 3 * dof, 40.0 + 4 * dof):
        assert chi_square_tail(x, dof) == pytest.approx(stats.chi2.sf(x, dof), rel=1e-9)
    assert normal_tails(-4.2) == pytest.approx(2 * stats.norm.sf(4.2), rel=1e-9)


@pytest.mark.parametrize("dof", [1, 31, 200])
def test_visible_is_where_the_power_is_reached(dof):
    size = compute_noncentrality(dof, LEVEL)
    edge = stats.chi2.isf(LEVEL, dof)
    assert stats.ncx2.sf(edge, dof, size) == pytest.approx(TEST_POWER, abs=1e-6)


def test_uniform_numbers_pass_and_others_do_not():
    u = numbers(20_000)
    fine = run_uniformity_test("", "", u, LEVEL)
    assert 1e-3 < fine.p_value < 1 and fine.n == 20_000
    assert run_uniformity_test("", "", u**1.2, LEVEL).p_value < LEVEL
    few = run_uniformity_test("", "", u[:30], LEVEL)
    assert few.p_value > 1e-3 and few.catches is not None and few.catches <= 1


def test_what_is_caught_is_caught():
    """A distribution that is off by as much as `catches`, in its least visible shape, is found in
    99 % of samples, so in all of 20 but 3 or more once in 1e3 seeds."""
    n, p_values = 4000, []
    off = run_uniformity_test("", "", numbers(n), LEVEL).catches
    assert off is not None
    for seed in range(20):
        u = numbers(n, seed)  # every other bin of the 32 is heavier by 2 off, the rest lighter
        bins, move = (u * 32).long(), numbers(n, 100 + seed) < 2 * off
        bins = torch.where(move & (bins % 2 == 1), bins - 1, bins)
        p_values.append(run_uniformity_test("", "", (bins + 0.5) / 32, LEVEL).p_value < LEVEL)
    assert sum(p_values) >= 18


def test_events_as_often_as_said():
    chances = numbers(5000, 1)
    hits = (numbers(5000, 2) < chances).double()
    fine = run_frequency_test("", "", hits, chances, LEVEL)
    variance = float((chances * (1 - chances)).sum())
    z = float((hits - chances).sum()) / math.sqrt(variance)
    assert fine.p_value == pytest.approx(2 * stats.norm.sf(abs(z)), rel=1e-9)
    assert fine.catches is not None
    shifted = (chances + fine.catches).clamp(max=1.0)
    more = (numbers(5000, 3) < shifted).double()
    assert run_frequency_test("", "", more, chances, LEVEL).p_value < LEVEL
    certain = torch.ones(50).double()
    assert run_frequency_test("", "", certain, certain, LEVEL).p_value == 1


def test_numbers_that_come_back_are_seen():
    rows = [numbers(8, seed) for seed in range(300)]
    assert run_correlation_test("", "", rows, 3).p_value > 1e-3
    again = [torch.cat([row[:6], row[3:5]]) for row in rows]
    assert run_correlation_test("", "", again, 3).p_value < 1e-10
    assert run_correlation_test("", "", [row[:1] for row in rows], 3).p_value == 1


def test_two_samples_are_scipys():
    a, b = np.array([40.0, 30.0, 80.0, 3.0, 2.0]), np.array([90.0, 50.0, 170.0, 2.0, 1.0])
    expected = stats.chi2_contingency([[40, 30, 80, 5], [90, 50, 170, 3]])
    test = run_two_sample_test("", "", [(a, b)], LEVEL)
    assert test.p_value == pytest.approx(expected.pvalue, rel=1e-9) and test.n == 155
    other = np.array([80.0, 30.0, 40.0, 3.0, 2.0])
    assert run_two_sample_test("", "", [(a, b), (other, b)], LEVEL).p_value < LEVEL
    assert run_two_sample_test("", "", [(a[:1], b[:1])], LEVEL).p_value == 1


P = torch.tensor([[0.1, 0.6, 0.0, 0.3]])


def test_where_a_token_lies():
    distribution = P.repeat(4, 1)
    values = compute_uniforms(
        distribution, torch.tensor([0, 1, 2, 3]), torch.full((4,), 0.5).double()
    )
    near = {"atol": 1e-6, "rtol": 0}
    torch.testing.assert_close(values.by_id, torch.tensor([0.05, 0.4, 0.7, 0.85]).double(), **near)
    torch.testing.assert_close(values.ranked, torch.tensor([0.95, 0.3, 1, 0.75]).double(), **near)


def test_ties_share_their_mass():
    values = compute_uniforms(
        torch.full((2, 4), 0.25), torch.tensor([3, 0]), torch.tensor([0.5, 0.25])
    )
    assert values.ranked.tolist() == [0.5, 0.25]


def test_drawn_tokens_are_uniform():
    """Fails by chance for two seeds in a million."""
    dice = torch.Generator().manual_seed(0)
    distributions = torch.rand(20_000, 7, generator=dice, dtype=torch.float64) ** 4
    u, noise = torch.rand(2, 20_000, generator=dice, dtype=torch.float64)
    distributions = distributions / distributions.sum(-1, keepdim=True)
    values = compute_uniforms(distributions, sample(distributions, u), noise)
    assert run_uniformity_test("", "", values.ranked, 1e-6).p_value > 1e-6
    assert run_uniformity_test("", "", values.by_id, 1e-6).p_value > 1e-6
    wrong = compute_uniforms(distributions**1.1, sample(distributions, u), noise)
    assert run_uniformity_test("", "", wrong.ranked, 1e-6).p_value < 1e-6
