"""Section 3: what holds for every alpha, gamma, c and pair of distributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken import theory
from foretoken.theory import (
    ORACLE_BOUND,
    expected_tokens,
    improves,
    operations_factor,
    optimal_gamma,
    oracle_factor,
    walltime_factor,
)

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
    assert theory.beta(p, q) == pytest.approx(1 - distance, abs=1e-12)
    assert (distance < 1e-12) == np.allclose(p, q, rtol=0, atol=1e-12)
    assert (distance > 1 - 1e-12) == (not np.any((p > 0) & (q > 0)))


@given(distribution_pairs())
def test_match_probability(pair):
    """Bounded by total variation (arXiv 2408.07978), and the same from either side."""
    p, q = pair
    match, distance = theory.match_probability(p, q), theory.d_lk(p, q)
    assert (1 - distance) / (1 + distance) - 1e-12 <= match <= 1 - distance + 1e-12
    assert match == pytest.approx(theory.match_probability(q, p), abs=1e-12)
    possible = [i for i in range(len(p)) if p[i] and q[i]]
    plainly = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in possible)
    assert match == pytest.approx(plainly, abs=1e-12)


@given(st.lists(distribution_pairs(), min_size=1, max_size=5))
def test_alpha_is_one_minus_the_mean_distance(pairs):
    """Corollary 3.6."""
    alpha = theory.alpha([theory.beta(p, q) for p, q in pairs])
    assert alpha == pytest.approx(1 - np.mean([theory.d_lk(p, q) for p, q in pairs]), abs=1e-12)


@given(probabilities, gammas)
def test_expected_tokens_bounds(alpha: float, gamma: int):
    tokens = expected_tokens(alpha, gamma)
    assert 1 <= tokens <= gamma + 1
    assert tokens <= oracle_factor(alpha, 0) * NOISE


@given(probabilities, costs, st.integers(1, 40))
def test_cor_3_9(alpha: float, c: float, gamma: int):
    """alpha > c: gamma 1 improves by (1 + alpha) / (1 + c). Otherwise no gamma improves."""
    first = walltime_factor(alpha, 1, c)
    assert first == pytest.approx((1 + alpha) / (1 + c))
    if improves(alpha, c):
        assert first >= 1
        assert walltime_factor(alpha, optimal_gamma(alpha, c), c) >= first
    else:
        assert walltime_factor(alpha, gamma, c) <= NOISE


@given(probabilities, costs, st.integers(2, 40))
def test_a_gamma_that_improves_has_smaller_ones_that_do(alpha: float, c: float, gamma: int):
    if walltime_factor(alpha, gamma, c) > NOISE:
        assert all(walltime_factor(alpha, g, c) > 1 for g in range(1, gamma))


@given(probabilities, probabilities, gammas, costs)
def test_monotone_in_alpha(a: float, b: float, gamma: int, c: float):
    low, high = sorted((a, b))
    assert walltime_factor(low, gamma, c) <= walltime_factor(high, gamma, c) * NOISE
    assert operations_factor(low, gamma, c) * NOISE >= operations_factor(high, gamma, c)


@given(probabilities, gammas, costs, costs)
def test_monotone_in_cost(alpha: float, gamma: int, a: float, b: float):
    low, high = sorted((a, b))
    assert walltime_factor(alpha, gamma, low) >= walltime_factor(alpha, gamma, high)
    assert operations_factor(alpha, gamma, low) <= operations_factor(alpha, gamma, high)


@given(probabilities, gammas, costs)
def test_more_draft_tokens_more_tokens_and_operations(alpha: float, gamma: int, c_hat: float):
    assert expected_tokens(alpha, gamma) <= expected_tokens(alpha, gamma + 1)
    less, more = (operations_factor(alpha, g, c_hat) for g in (gamma, gamma + 1))
    assert 1 <= less * NOISE and less <= more * NOISE


@given(
    probabilities,
    costs,
    st.lists(st.floats(0.5, 4), min_size=12, max_size=12),
    st.one_of(st.none(), st.integers(1, 12)),
)
def test_optimal_gamma_is_the_argmax(alpha: float, c: float, v: list[float], tokens: int | None):
    best = optimal_gamma(alpha, c, v=v, max_gamma=10, tokens=tokens)
    factors = [walltime_factor(alpha, g, c, v=v, tokens=tokens) for g in range(11)]
    assert factors[best] == max(factors)
    assert all(factor < factors[best] for factor in factors[:best])


@given(probabilities, gammas, costs, st.integers(1, 30))
def test_few_tokens_cap_the_factor(alpha: float, gamma: int, c: float, tokens: int):
    factor = walltime_factor(alpha, gamma, c, tokens=tokens)
    assert factor <= tokens * NOISE
    free = walltime_factor(alpha, gamma, 0, tokens=tokens)
    assert factor <= free * NOISE
    assert free <= expected_tokens(alpha, gamma) * NOISE  # the last run may give too many


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


@given(distribution_pairs())
def test_draft_tokens_at_random_always_gain(pair):
    """Section 3.6: a token drawn uniformly is kept with 1 / V at least, whatever the target, and
    costs nothing."""
    p = pair[0]
    alpha = theory.beta(p, np.full(len(p), 1 / len(p)))
    assert alpha >= 1 / len(p) / NOISE
    assert walltime_factor(alpha, 1, c=0) >= (1 + 1 / len(p)) / NOISE


@given(probabilities, gammas)
def test_where_draft_tokens_cost_nothing_the_factor_is_that_of_the_tokens(alpha: float, gamma: int):
    """Section 3.6, negligible-cost models: equation 1, bounded by 1 / (1 - alpha)."""
    assert walltime_factor(alpha, gamma, c=0) == expected_tokens(alpha, gamma)
    assert walltime_factor(alpha, gamma, c=0) <= oracle_factor(alpha, 0) * NOISE


@given(distribution_pairs(), st.floats(0.05, 1), st.floats(0.05, 1))
def test_lenient_acceptance_is_concave_in_one_over_lenience(pair, a: float, b: float):
    """Appendix A.5: alpha_l = sum min(p/l, q); nothing is above alpha / l."""
    between = 2 / (1 / a + 1 / b)
    ends = theory.lenient_beta(*pair, a) + theory.lenient_beta(*pair, b)
    assert theory.lenient_beta(*pair, between) >= ends / 2 - 1e-12
    assert theory.lenient_beta(*pair, a) <= theory.beta(*pair) / a + 1e-12
