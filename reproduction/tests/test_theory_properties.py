"""The paper's theory beyond what foretoken computes with: what holds for all numbers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken.theory import beta, expected_tokens, optimal_gamma, walltime_factor
from reproduction import theory
from reproduction.theory import ORACLE_BOUND, improves, operations_factor, oracle_factor

probabilities = st.floats(0, 1)
costs = st.floats(0, 3)
gammas = st.integers(0, 40)
NOISE = 1 + 1e-12


@st.composite
def distribution_pairs(draw):
    """Two distributions of whole numbers over their sum, so that equal and disjoint ones are
    frequent."""
    V = draw(st.integers(2, 6))
    weights = st.lists(st.integers(0, 4), min_size=V, max_size=V).filter(any)
    p, q = (np.array(draw(weights), dtype=float) for _ in range(2))
    return p / p.sum(), q / q.sum()


@given(distribution_pairs())
def test_d_lk(pair):
    """Corollary 3.4 and Theorem 3.5."""
    p, q = pair
    distance = theory.d_lk(p, q)
    assert 0 <= distance <= 1
    assert distance == theory.d_lk(q, p)
    assert beta(p, q) == pytest.approx(1 - distance, abs=1e-12)
    assert (distance < 1e-12) == np.allclose(p, q, rtol=0, atol=1e-12)
    assert (distance > 1 - 1e-12) == (not np.any((p > 0) & (q > 0)))


@given(st.lists(distribution_pairs(), min_size=1, max_size=5))
def test_alpha_is_one_minus_the_mean_distance(pairs):
    """Corollary 3.6."""
    alpha = theory.alpha([beta(p, q) for p, q in pairs])
    assert alpha == pytest.approx(1 - np.mean([theory.d_lk(p, q) for p, q in pairs]), abs=1e-12)


@given(probabilities, gammas, costs)
def test_more_draft_tokens_more_tokens_and_operations(alpha: float, gamma: int, c_hat: float):
    assert expected_tokens(alpha, gamma) <= expected_tokens(alpha, gamma + 1)
    less, more = (operations_factor(alpha, g, c_hat) for g in (gamma, gamma + 1))
    assert 1 <= less * NOISE and less <= more * NOISE


@given(st.floats(0, 0.97), st.floats(0.01, 2))
def test_oracle_bounds(alpha: float, c: float):
    """At most e / (e - 1) above the best fixed gamma, which these alpha and c keep below 100."""
    best = max(1.0, walltime_factor(alpha, optimal_gamma(alpha, c, max_gamma=100), c))
    oracle = oracle_factor(alpha, c)
    assert oracle <= best * ORACLE_BOUND
    if c <= 1:
        assert best <= oracle * NOISE


@given(probabilities, st.floats(0.01, 9), st.floats(0.01, 9), costs)
def test_execution_improves_where_the_draft_token_costs_less_than_it_saves(
    beta: float, f: float, g: float, q: float
):
    """It improves exactly where q < beta min(f, g), and never more than twofold."""
    factor = theory.execution_factor(beta, f, g, q)
    assert factor <= 2 * NOISE
    if abs(q - beta * min(f, g)) > 1e-9:
        assert theory.execution_improves(beta, f, g, q) == (factor > 1)


@given(probabilities, costs)
def test_alpha_above_c_is_where_some_gamma_improves(alpha: float, c: float):
    """Corollary 3.9."""
    factor = walltime_factor(alpha, optimal_gamma(alpha, c), c)
    if improves(alpha, c):
        assert factor >= (1 + alpha) / (1 + c) / NOISE
    else:
        assert factor <= NOISE


@given(probabilities, probabilities, gammas, costs)
def test_operations_fall_with_alpha_and_grow_with_c_hat(a: float, b: float, gamma: int, c: float):
    low, high = sorted((a, b))
    assert operations_factor(low, gamma, c) * NOISE >= operations_factor(high, gamma, c)
    assert operations_factor(a, gamma, low) <= operations_factor(a, gamma, high)


@given(probabilities, gammas)
def test_tokens_are_bounded_by_the_oracle(alpha: float, gamma: int):
    """Section 3.6: 1 / (1 - alpha), whatever gamma is."""
    assert expected_tokens(alpha, gamma) <= oracle_factor(alpha, 0) * NOISE
