"""Distributions and numbers: what is accepted, and the message for what is not."""

from __future__ import annotations

import math

import numpy as np
import pytest

from foretoken import argument_checks
from foretoken.errors import InputError, format_value


def test_a_distribution_comes_back_in_float64():
    distribution = argument_checks.check_distribution("p", np.array([0.25, 0.75], dtype=np.float32))
    assert distribution.dtype == np.float64 and distribution.tolist() == [0.25, 0.75]
    assert [
        distribution.tolist()
        for distribution in argument_checks.check_distributions([1], [1.00005])
    ] == [
        [1.0],
        [1.00005],
    ]


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ([[0.5, 0.5]], r"p has shape \(1, 2\); give one distribution"),
        ([1.5, -0.5], "p has the probability -0.5 for token 1; give numbers of 0 or more"),
        ([math.nan, 1.0], "p has the probability nan for token 0"),
        ([math.inf, 1.0], "p has the probability inf for token 0"),
        ([0.5, 0.2], "p sums to 0.7; give a distribution, which sums to 1"),
        ([], "p sums to 0;"),
        (["a", "b"], r"p is \['a', 'b'\]; give an array of numbers"),
        ([[0.5], [0.2, 0.3]], "p is .*; give an array of numbers"),
    ],
)
def test_what_is_not_a_distribution(values, says):
    with pytest.raises(InputError, match=f"^{says}"):
        argument_checks.check_distribution("p", values)


def test_distributions_over_different_tokens():
    with pytest.raises(InputError, match="p has 1 tokens, but q has 2"):
        argument_checks.check_distributions([1.0], [0.5, 0.5])


@pytest.mark.parametrize(
    "value", [-0.1, 1.1, math.nan, "half", True, -(10**5000)], ids=lambda value: format_value(value)
)
def test_numbers_outside_their_range(value):
    with pytest.raises(InputError, match="^alpha is .*"):
        argument_checks.check_probability("alpha", value)
    with pytest.raises(InputError, match="^lenience is .*"):
        argument_checks.check_lenience(value)
    if value != 1.1:
        with pytest.raises(InputError, match="^c is .*"):
            argument_checks.check_cost("c", value)
    with pytest.raises(InputError, match="^gamma is .*"):
        argument_checks.check_count("gamma", value)


def test_counts():
    assert (
        argument_checks.check_count("gamma", 3.0) == 3
        and type(argument_checks.check_count("gamma", np.int8(3))) is int
    )
    assert argument_checks.check_count("tokens", 1_000_000, minimum=1) == 1_000_000
    with pytest.raises(InputError, match="^tokens is 0"):
        argument_checks.check_count("tokens", 0, minimum=1)
    for value in (1_000_001, math.inf):
        with pytest.raises(InputError, match="^tokens is .*"):
            argument_checks.check_count("tokens", value)
