"""Section 3: every printed figure that follows from a formula, the errata, and the edges."""

from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest

from foretoken import theory
from foretoken.errors import InputError
from foretoken.theory import (
    expected_tokens,
    optimal_gamma,
    tokens_distribution,
    walltime_factor,
)

HUGE = 10**400  # an integer that no float comes near

TABLE_1 = [  # alpha, gamma, speed with c = 0
    (0.6, 2, 1.96),
    (0.7, 3, 2.53),
    (0.8, 2, 2.44),
    (0.8, 5, 3.69),
    (0.9, 2, 2.71),
    (0.9, 10, 6.86),
]

FIGURE_3 = {  # c: the optimal gamma for alpha = .5, .6, .7, .8, .9
    0.01: [5, 7, 9, 14, 24],
    0.02: [4, 6, 8, 11, 19],
    0.05: [3, 4, 6, 8, 13],
    0.1: [2, 3, 4, 6, 10],
}

TABLE_4 = [  # gamma, alpha, c, EXP
    (7, 0.75, 0.02, 3.2),
    (7, 0.80, 0.04, 3.3),
    (7, 0.82, 0.11, 2.5),
    (7, 0.62, 0.02, 2.3),
    (5, 0.68, 0.04, 2.4),
    (3, 0.71, 0.11, 2.0),
    (5, 0.65, 0.02, 2.4),
    (5, 0.73, 0.04, 2.6),
    (3, 0.74, 0.11, 2.0),
    (5, 0.53, 0.02, 1.9),
    (3, 0.55, 0.04, 1.8),
    (3, 0.56, 0.11, 1.6),
]

ROUNDED_INPUTS = [(5, 0.68, 0.04), (3, 0.71, 0.11), (3, 0.56, 0.11)]  # three rows of table 4


# --- the paper's figures ---


@pytest.mark.parametrize(("alpha", "gamma", "speed"), TABLE_1)
def test_table_1(alpha: float, gamma: int, speed: float):
    assert round(walltime_factor(alpha, gamma, c=0), 2) == speed


@pytest.mark.parametrize("c", FIGURE_3)
def test_figure_3(c: float):
    assert [optimal_gamma(alpha, c) for alpha in (0.5, 0.6, 0.7, 0.8, 0.9)] == FIGURE_3[c]


@pytest.mark.parametrize(("gamma", "alpha", "c", "printed"), TABLE_4)
def test_table_4(gamma: int, alpha: float, c: float, printed: float):
    """Nine rows follow from the printed inputs; three only before alpha and c were rounded."""
    follows = round(walltime_factor(alpha, gamma, c), 1) == printed
    assert follows == ((gamma, alpha, c) not in ROUNDED_INPUTS)
    low = walltime_factor(alpha - 0.005, gamma, c + 0.005)
    high = walltime_factor(alpha + 0.005, gamma, c - 0.005)
    assert low - 0.05 <= printed <= high + 0.05


def test_greedy_lenience():
    """Appendix A.5: 3.3, 3.3, 3.9, 4.9 for gamma 8, c .015."""
    factors = [walltime_factor(alpha, 8, 0.015) for alpha in (0.75, 0.75, 0.8, 0.87)]
    assert [round(factor, 2) for factor in factors] == [3.30, 3.30, 3.87, 4.91]
    assert [round(factor, 1) for factor in factors] == [3.3, 3.3, 3.9, 4.9]


def test_bigram():
    """Section 4.2: alpha about .2, gamma 3, c about 0 gives 1.25x."""
    assert round(walltime_factor(0.2, 3, 0), 3) == 1.248


def test_lenience_at_temperature_1_is_not_attainable():
    """Erratum: 2.5, 3.1, 3.6, 5.0 are printed for c .015; no gamma gives them, c near .01 would."""
    alphas, printed = [0.62, 0.71, 0.76, 0.84], [2.5, 3.1, 3.6, 5.0]

    def best(c: float) -> list[float]:
        return [walltime_factor(alpha, optimal_gamma(alpha, c), c) for alpha in alphas]

    assert [round(factor, 2) for factor in best(0.015)] == [2.33, 2.94, 3.45, 4.79]
    assert [round(factor, 2) for factor in best(0.01)] == [2.41, 3.06, 3.62, 5.11]
    assert all(b + 0.05 < p for b, p in zip(best(0.015), printed, strict=True))


def test_table_2_gammas_are_not_the_optimum():
    """Erratum: EnDe T5-small at temperature 0 used 7, the optimum is 9; no row loses over 2.6 %."""
    assert optimal_gamma(0.75, 0.02) == 9
    factors = [
        (walltime_factor(a, g, c), walltime_factor(a, optimal_gamma(a, c), c))
        for g, a, c, _ in TABLE_4
    ]
    losses = [1 - used / best for used, best in factors]
    assert round(max(losses), 3) == 0.026
    assert sum(loss == 0 for loss in losses) == 2  # only two rows used the optimum


# --- beta ---


def test_beta_by_hand():
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    assert theory.beta(p, q) == pytest.approx(0.6)
    assert theory.beta(p, p) == 1


def test_match_probability_by_hand():
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    expected = sum(
        1 / sum(max(a / p[i], b / q[i]) for a, b in zip(p, q, strict=True)) for i in range(3)
    )
    assert theory.match_probability(p, q) == pytest.approx(expected, abs=1e-15)
    assert theory.match_probability([0.5, 0.5, 0], [0, 0.5, 0.5]) == pytest.approx(1 / 3)
    assert theory.match_probability([1, 0], [0, 1]) == 0


def test_beta_is_the_expected_acceptance():
    """Theorem 3.5 by enumeration: the mean of min(1, p/q) over x ~ q."""
    p, q = np.array([0.0, 0.4, 0.35, 0.25]), np.array([0.3, 0.1, 0.6, 0.0])
    drawn = q > 0
    acceptance = (q[drawn] * np.minimum(1, p[drawn] / q[drawn])).sum()
    assert theory.beta(p, q) == pytest.approx(acceptance)


# --- tokens per run ---


@pytest.mark.parametrize("alpha", [0.0, 0.3, 0.9, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 5])
def test_tokens_distribution(alpha: float, gamma: int):
    distribution = tokens_distribution(alpha, gamma)
    assert len(distribution) == gamma + 1 and min(distribution) >= 0
    assert sum(distribution) == pytest.approx(1)
    mean = sum(k * prob for k, prob in enumerate(distribution, start=1))
    assert mean == pytest.approx(expected_tokens(alpha, gamma))


def test_expected_tokens_at_the_edges():
    assert expected_tokens(0.0, 7) == 1
    assert expected_tokens(1.0, 7) == 8
    assert expected_tokens(0.4, 0) == 1


def test_expected_tokens_just_below_alpha_1():
    """The closed form loses all digits here: it would be off by 10 % and more."""
    alpha = 1 - 5 * 2.0**-53
    assert expected_tokens(alpha, 9) == pytest.approx(10, rel=1e-14)


# --- walltime and operations ---


def test_useless_drafter_costs_its_draft_tokens():
    assert walltime_factor(0.0, 4, c=0.25) == 0.5


def test_verify_cost_as_sequence_and_function():
    v = [0.0, 1.0, 1.1, 1.3]  # v[0] is unused
    expected = (1 + 0.8 + 0.64) / (2 * 0.1 + 1.3)
    assert walltime_factor(0.8, 2, 0.1, v=v) == pytest.approx(expected)
    assert walltime_factor(0.8, 2, 0.1, v=lambda n: v[n]) == pytest.approx(expected)


def test_verify_cost_moves_the_optimum():
    """Where a block costs as much as its tokens one by one, no gamma pays."""
    assert optimal_gamma(0.8, 0.05, v=lambda n: float(n)) == 0
    assert optimal_gamma(0.8, 0.05, v=lambda n: 1 + 0.2 * (n - 1)) == 3
    assert optimal_gamma(0.8, 0.05, v=[0, 1, 1, 5, 5, 5], max_gamma=4) == 1


def test_optimal_gamma_at_the_edges():
    assert optimal_gamma(0.0, 0.0) == 0
    assert optimal_gamma(1.0, 0.0, max_gamma=12) == 12
    assert optimal_gamma(1.0, 1.0) == 0  # all equal: the smallest
    assert optimal_gamma(0.9, 0.01, max_gamma=0) == 0
    assert optimal_gamma(0.9, 0.01, tokens=1) == 0
    assert optimal_gamma(1.0, 0.01, tokens=6) == 5


# --- a given number of tokens ---


def runs_by_enumeration(alpha: float, gamma: int, tokens: int) -> float:
    """Expected number of runs, gamma never cut: sum over every sequence of run lengths."""
    if tokens <= 0:
        return 0.0
    distribution = enumerate(tokens_distribution(alpha, gamma), start=1)
    return 1 + sum(prob * runs_by_enumeration(alpha, gamma, tokens - k) for k, prob in distribution)


@pytest.mark.parametrize("alpha", [0.0, 0.45, 0.9, 1.0])
@pytest.mark.parametrize("gamma", [0, 1, 3, 9])
def test_expected_runs(alpha: float, gamma: int):
    """Cutting gamma at the end, as is done, changes no number of runs."""
    for tokens in range(1, 8):
        expected = runs_by_enumeration(alpha, gamma, tokens)
        assert tokens / walltime_factor(alpha, gamma, 0, tokens=tokens) == pytest.approx(expected)


def test_factor_for_few_tokens_by_hand():
    """Two tokens at gamma 5: one draft token and one run; rejected, one plain run more."""
    alpha, c, v = 0.6, 0.1, [0.0, 1.0, 1.2]
    cost = (c + 1.2) + (1 - alpha) * 1.0
    assert walltime_factor(alpha, 5, c, v=v, tokens=2) == pytest.approx(2 / cost)
    assert walltime_factor(alpha, 5, c, v=v, tokens=1) == 1


# --- what is refused ---


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: expected_tokens(1.5, 3), "alpha is 1.5; give a number in [0, 1]"),
        (lambda: expected_tokens(0.5, -1), "gamma is -1; give a whole number, 0 or more"),
        (lambda: walltime_factor(0.5, 2, -0.1), "c is -0.1; give a number from 0 to 1e+100"),
        (lambda: walltime_factor(0.5, 2, 0, tokens=0), "tokens is 0; give a whole number, 1"),
        (lambda: walltime_factor(0.5, 2, 0, v=[0, 1]), "v ends at 1 tokens; give v[3] too"),
        (lambda: walltime_factor(0.5, 2, 0, v=lambda n: 0), "v of 3 tokens is 0"),
        (lambda: theory.beta([0.5, 0.5], [0.5, 0.2]), "q sums to 0.7"),
        (lambda: theory.beta([1.0], [0.5, 0.5]), "p has 1 tokens, but q has 2"),
        (lambda: theory.beta([HUGE, 0], [0.5, 0.5]), "p is [1000"),
        (lambda: theory.walltime_factor(0.5, 2, 0, v=[0, 1, 1, HUGE]), "v of 3 tokens is 1000"),
        (lambda: theory.walltime_factor(0.5, 2, 0, v=[0, 1, 1, "a"]), "v of 3 tokens is 'a'"),
        (lambda: expected_tokens(0.5, 1_000_001), "gamma is 1000001; give 1,000,000 or less"),
        (lambda: optimal_gamma(0.5, 0.1, tokens=10**7), "tokens is 10000000; give 1,000,000 or"),
    ],
)
def test_refuses(call, says: str):
    with pytest.raises(InputError) as error:
        call()
    assert says in str(error.value)
    assert "; give " in str(error.value) and "\n" not in str(error.value)


TAKING = {  # an argument's name: a function of it
    "alpha": [
        lambda x: expected_tokens(x, 3),
        lambda x: tokens_distribution(x, 3),
        lambda x: walltime_factor(x, 3, 0.1, tokens=9),
    ],
    "gamma": [
        lambda x: expected_tokens(0.5, x),
        lambda x: tokens_distribution(0.5, x),
        lambda x: walltime_factor(0.5, x, 0.1),
        lambda x: walltime_factor(0.5, x, 0.1, v=lambda n: 1.0),
        lambda x: walltime_factor(0.5, x, 0.1, tokens=9),
    ],
    "tokens": [lambda x: walltime_factor(0.5, 3, 0.1, tokens=x)],
    "max_gamma": [lambda x: optimal_gamma(0.5, 0.1, max_gamma=x)],
    "c": [lambda x: walltime_factor(0.5, 2, x)],
    "lenience": [lambda x: theory.lenient_beta([0.5, 0.5], [1, 0], x)],
}
CALLS = [(name, call) for name, calls in TAKING.items() for call in calls]


@pytest.mark.parametrize(
    "value",
    [HUGE, -HUGE, 10**5000, True, [], "1", 1j, Decimal(1)],
    ids=["huge", "minus huge", "more digits than Python writes", *"bls", "complex", "decimal"],
)
@pytest.mark.parametrize(("name", "call"), CALLS)
def test_what_is_no_number_or_has_no_float_is_refused_by_its_name(name, call, value):
    with pytest.raises(InputError, match=f"^{name} is .*; give ") as error:
        call(value)
    assert len(str(error.value)) < 160


@pytest.mark.parametrize(("name", "call"), CALLS)
def test_numbers_of_numpy_are_numbers(name, call):
    """And none of them overflows: 127 draft tokens and one more are no int8."""
    if name in ("gamma", "tokens", "max_gamma"):
        kinds, value = (np.int8, np.uint8, np.int64, np.float64), 127
    else:
        kinds, value = (np.float16, np.float32, np.float64, Fraction), 0.5
    expected = call(value)
    for kind in kinds:
        got = call(kind(value))
        assert got == expected
        assert "numpy" not in type(got).__module__


def test_many_draft_tokens_and_tokens_need_no_table_of_both():
    assert walltime_factor(0.5, 20_000, 0, tokens=20_000) == pytest.approx(2, rel=1e-3)


def test_a_run_never_gives_less_than_one_token_by_rounding() -> None:
    assert expected_tokens(0.3315186905833665, 0) == 1.0


@pytest.mark.parametrize(
    ("share", "alpha", "gamma", "c", "v"),
    [
        (Fraction(1, 4), Fraction(9, 10), 4, Fraction(1, 20), Fraction(6, 5)),
        (Fraction(1, 1), Fraction(1, 2), 2, Fraction(1, 10), Fraction(1)),
        (Fraction(0, 1), Fraction(1, 2), 2, Fraction(1, 10), Fraction(3)),
    ],
)
def test_steps_without_draft_tokens_cost_a_plain_pass_and_give_one_token(
    share: Fraction, alpha: Fraction, gamma: int, c: Fraction, v: Fraction
) -> None:
    """A drafter that guesses at a known share of steps: every outcome of a step by its exact
    probability, added up, against the formula."""
    tokens = seconds = Fraction(0)
    for draft_tokens, chance in ((gamma, share), (0, 1 - share)):
        seconds += chance * (draft_tokens * c + (v if draft_tokens else 1))
        for kept in range(draft_tokens + 1):
            distribution = alpha**kept * (1 - alpha if kept < draft_tokens else 1)
            tokens += chance * distribution * (kept + 1)
    steps = {gamma: 1000 * share, 0: 1000 * (1 - share)}
    counts = {draft_tokens: int(count) for draft_tokens, count in steps.items()}
    cost = [0.0, 1.0, *[float(v)] * gamma]
    factor = theory.steps_factor(float(alpha), counts, float(c), v=cost)
    assert factor == pytest.approx(float(tokens / seconds))


def test_no_step_has_no_factor() -> None:
    with pytest.raises(InputError, match="steps"):
        theory.steps_factor(0.7, {}, 0.1)
