"""Section 3: what holds for every alpha, gamma, c and pair of distributions."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from foretoken import theory
from foretoken.theory import (
    expected_tokens,
    optimal_gamma,
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
def test_match_probability(pair):
    """Bounded by total variation (arXiv 2408.07978), and the same from either side."""
    p, q = pair
    match, distance = theory.match_probability(p, q), 1 - theory.beta(p, q)
    assert (1 - distance) / (1 + distance) - 1e-12 <= match <= 1 - distance + 1e-12
    assert match == pytest.approx(theory.match_probability(q, p), abs=1e-12)
    possible = [i for i in range(len(p)) if p[i] and q[i]]
    plainly = sum(1 / np.maximum(p / p[i], q / q[i]).sum() for i in possible)
    assert match == pytest.approx(plainly, abs=1e-12)


@given(probabilities, gammas)
def test_expected_tokens_bounds(alpha: float, gamma: int):
    tokens = expected_tokens(alpha, gamma)
    assert 1 <= tokens <= gamma + 1 and tokens * (1 - alpha) <= NOISE


@given(probabilities, costs, st.integers(1, 40))
def test_cor_3_9(alpha: float, c: float, gamma: int):
    """alpha > c: gamma 1 improves by (1 + alpha) / (1 + c). Otherwise no gamma improves."""
    first = walltime_factor(alpha, 1, c)
    assert first == pytest.approx((1 + alpha) / (1 + c))
    if alpha > c:
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


@given(probabilities, gammas, costs, costs)
def test_monotone_in_cost(alpha: float, gamma: int, a: float, b: float):
    low, high = sorted((a, b))
    assert walltime_factor(alpha, gamma, low) >= walltime_factor(alpha, gamma, high)


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
    """Section 3.6, negligible-cost models: equation 1."""
    assert walltime_factor(alpha, gamma, c=0) == expected_tokens(alpha, gamma)


@given(distribution_pairs(), st.floats(0.05, 1), st.floats(0.05, 1))
def test_lenient_acceptance_is_concave_in_one_over_lenience(pair, a: float, b: float):
    """Appendix A.5: alpha_l = sum min(p/l, q); nothing is above alpha / l."""
    between = 2 / (1 / a + 1 / b)
    ends = theory.lenient_beta(*pair, a) + theory.lenient_beta(*pair, b)
    assert theory.lenient_beta(*pair, between) >= ends / 2 - 1e-12
    assert theory.lenient_beta(*pair, a) <= theory.beta(*pair) / a + 1e-12
