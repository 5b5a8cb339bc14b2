"""Distributions over finite sets and the rule for several guesses, by hand-computed numbers."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from foretoken.execute.finite import (
    finite_distribution,
    pick,
    sample_distribution,
    together,
    without,
)


def test_a_distribution_from_a_dict_or_an_array():
    distribution = finite_distribution("f", {"a": 0.25, "b": 0.75})
    assert list(distribution.outcomes) == ["a", "b"] and distribution.masses.tolist() == [
        0.25,
        0.75,
    ]
    halves = torch.tensor([0.5, 0.5], dtype=torch.bfloat16, requires_grad=True)
    distribution = finite_distribution("f", halves)
    assert list(distribution.outcomes) == [0, 1] and distribution.masses.dtype == np.float64


def test_rounding_is_scaled_away():
    assert finite_distribution("f", [0.3, 0.30002, 0.4]).masses.sum() == pytest.approx(1, abs=1e-15)


def test_outcomes_of_both_distributions():
    q, p = (
        finite_distribution("q", {"a": 0.5, "b": 0.5}),
        finite_distribution("f", {"b": 0.2, "c": 0.8}),
    )
    outcomes, q_masses, p_masses = together(q, p)
    assert list(outcomes) == ["a", "b", "c"]
    assert q_masses.tolist() == [0.5, 0.5, 0.0] and p_masses.tolist() == [0.0, 0.2, 0.8]


def test_one_guess_is_the_papers_rule():
    """Section 2.3: keep x with probability min(1, p/q), else draw from norm((p - q)+)."""
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    distribution = sample_distribution(p, q, [1])
    assert distribution.kept == pytest.approx(
        [0.5, 0.5]
    ) and distribution.residual == pytest.approx([1, 0, 0])
    assert distribution.beta == pytest.approx(0.2 + 0.3 + 0.2)
    assert sample_distribution(p, q, [0]).kept == pytest.approx([1, 0])
    none = sample_distribution(p, q, [])
    assert none.kept == pytest.approx([1]) and none.residual is p and none.beta == 0


def test_a_second_guess_is_judged_by_what_the_first_left():
    p, q = np.array([0.5, 0.3, 0.2]), np.array([0.2, 0.6, 0.2])
    distribution = sample_distribution(p, q, [1, 0])  # then p is [1, 0, 0] and q is [.5, 0, .5]
    assert distribution.kept == pytest.approx(
        [0.5, 0.5, 0.0]
    ) and distribution.beta == pytest.approx(0.75)


def test_without_an_outcome():
    assert without(np.array([0.2, 0.6, 0.2]), 1).tolist() == [0.5, 0, 0.5]
    assert without(np.array([0.0, 1.0]), 1).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("uniform", "index"),
    [(0.0, 1), (0.24, 1), (0.26, 3), (math.nextafter(1, 0), 3)],
)
def test_an_outcome_of_no_mass_is_never_picked(uniform, index):
    assert pick(np.array([0.0, 0.25, 0.0, 0.75, 0.0]), uniform) == index
