"""The paper's theory beyond what foretoken computes with: printed figures, errata and edges."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretoken.errors import InputError
from foretoken.theory import beta, walltime_factor
from reproduction import theory
from reproduction.theory import ORACLE_BOUND, operations_factor, oracle_factor

TABLE_1 = [  # alpha, gamma, operations with c_hat = 0
    (0.6, 2, 1.53),
    (0.7, 3, 1.58),
    (0.8, 2, 1.23),
    (0.8, 5, 1.63),
    (0.9, 2, 1.11),
    (0.9, 10, 1.60),
]


@pytest.mark.parametrize(("alpha", "gamma", "operations"), TABLE_1)
def test_table_1(alpha: float, gamma: int, operations: float):
    assert round(operations_factor(alpha, gamma, c_hat=0), 2) == operations


def test_operations_at_the_edges():
    assert operations_factor(0.7, 0, c_hat=3.0) == 1
    assert operations_factor(0.0, 4, c_hat=0.0) == 5


def test_d_lk_and_alpha_by_hand():
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    assert theory.d_lk(p, q) == pytest.approx(0.4)
    assert theory.alpha([beta(p, q), beta(p, p)]) == pytest.approx(0.8)


@pytest.mark.parametrize("lenience", [1.0, 0.5, 0.1])
def test_lenient_acceptance_in_all_its_forms(lenience: float):
    """Appendix A.5: five forms of one number, which exceeds beta by the bias."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    forms = theory.lenient_betas(p, q, lenience)
    assert max(forms) - min(forms) < 1e-12
    assert forms[0] - beta(p, q) == pytest.approx(theory.lenient_bias(p, q, lenience))


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: operations_factor(0.5, 2, math.nan), "c_hat is nan"),
        (lambda: oracle_factor(-0.1, 0.1), "alpha is -0.1"),
        (lambda: theory.improves(0.5, math.nan), "c is nan"),
        (lambda: theory.alpha([]), "betas is empty"),
        (lambda: theory.alpha([0.5, 1.2]), "beta is 1.2"),
        (lambda: theory.d_lk([1.0], [0.5, 0.5]), "p has 1 tokens and q 2"),
        (lambda: theory.lenient_betas([1.0], [1.0], 0), "lenience is 0"),
        (lambda: theory.execution_factor(0.5, "1", 1), "f is '1'; give a number from 0 to 1e+100"),
        (lambda: theory.execution_seconds(2, 1, 1), "beta is 2"),
        (lambda: theory.execution_improves(0.5, 1, -1), "g is -1"),
    ],
)
def test_refuses(call, says: str):
    with pytest.raises(InputError) as error:
        call()
    assert says in str(error.value) and "; give " in str(error.value)


def test_oracle_gains_at_most_58_percent():
    """Erratum: "~60 %" is e/(e-1) - 1 = 58.2 %, approached near alpha 1."""

    def gain(alpha: float, c: float, around: int = 32) -> float:
        gammas = range(max(0, around - 32), around + 33)
        fixed = max(walltime_factor(alpha, gamma, c) for gamma in gammas)
        return oracle_factor(alpha, c) / fixed - 1

    assert [round(gain(0.8, c), 2) for c in (0.01, 0.05, 0.1)] == [0.14, 0.35, 0.45]
    assert [round(gain(0.9, c), 2) for c in (0.01, 0.05, 0.1)] == [0.23, 0.48, 0.53]
    rest = 1e-3  # the optimum is at (1 - alpha) gamma = 1
    extreme = gain(1 - rest, rest / (math.e - 2), around=1000)
    assert 0.581 < extreme < ORACLE_BOUND - 1 < 0.582


def test_d_lk_is_the_distance_of_both_to_the_middle():
    """Definition 3.2."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.1, 0.2, 0.7])
    for distribution in (p, q):
        assert theory.d_lk(p, q) == pytest.approx(np.abs(distribution - (p + q) / 2).sum())


def test_oracle_at_the_edges():
    assert oracle_factor(1.0, 0.0) == math.inf
    assert oracle_factor(0.0, 0.3) == 1
    assert oracle_factor(0.75, 0.0) == 4


def test_the_dearest_costs_are_still_floats():
    """Times the most draft tokens: JSON has no infinity."""
    assert math.isfinite(operations_factor(0.0, 1_000_000, 1e100))


def test_speculative_execution_by_hand():
    """f 4, g 3, q .5: a right draft token takes .5 + 4, a wrong one .5 + 7."""
    assert theory.execution_seconds(0.8, 4, 3, 0.5) == pytest.approx(0.8 * 4.5 + 0.2 * 7.5)
    assert theory.execution_factor(0.8, 4, 3, 0.5) == pytest.approx(7 / 5.1)
    assert theory.execution_factor(1, 2, 2) == 2
    assert theory.execution_factor(0, 2, 1, 1) == 0.75
    with pytest.raises(InputError, match="f and g take 0 and 0"):
        theory.execution_factor(0.5, 0, 0)
