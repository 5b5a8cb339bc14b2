"""Distributions and numbers as callers give them, checked: an InputError names an invalid one.

Knows no formula.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.errors import InputError, as_float, format_value

Distribution = NDArray[np.float64]
MAX_COUNT = 1_000_000  # guesses or tokens: a longer table would not fit in memory
MAX_COST = 1e100  # the largest cost: times so many draft tokens it is still finite
MIN_LENIENCE = 1e-30  # the least lenience: a float32 probability divided by it is still finite


def check_distributions(p: ArrayLike, q: ArrayLike) -> tuple[Distribution, Distribution]:
    """Return two distributions, `[V]` each, over the same tokens."""
    p, q = check_distribution("p", p), check_distribution("q", q)
    if p.size != q.size:
        raise InputError(f"p has {p.size} tokens and q {q.size}; give laws over the same tokens")
    return p, q


def check_distribution(name: str, values: ArrayLike) -> Distribution:
    """Return a distribution `[V]` in float64."""
    masses = to_array(name, values)
    if masses.ndim != 1:
        raise InputError(f"{name} has shape {masses.shape}; give one law, of shape (V,)")
    invalid = np.flatnonzero(~((masses >= 0) & (masses < math.inf)))
    if invalid.size:
        i = int(invalid[0])
        raise InputError(
            f"{name} has a probability of {masses[i]} for {i}; give numbers, 0 or more"
        )
    total = masses.sum()
    if not abs(total - 1) < 1e-4:  # a float32 distribution carries the rounding of many terms
        raise InputError(f"{name} sums to {total:g}; give a law, which sums to 1")
    return masses


def to_array(name: str, values: ArrayLike) -> Distribution:
    """Return an array in float64."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # ragged, text, or beyond a float
        raise InputError(f"{name} is {format_value(values)}; give an array of numbers") from None


def check_probability(name: str, value: float) -> float:
    number = as_float(value)
    if not 0 <= number <= 1:
        raise InputError(f"{name} is {format_value(value)}; give a number in [0, 1]")
    return number


def check_lenience(value: float) -> float:
    number = as_float(value)
    if not MIN_LENIENCE <= number <= 1:
        raise InputError(
            f"lenience is {format_value(value)}; give a number from {MIN_LENIENCE:g} to 1, 1 "
            "being exact"
        )
    return number


def check_cost(name: str, value: float) -> float:
    number = as_float(value)
    if not 0 <= number <= MAX_COST:
        raise InputError(f"{name} is {format_value(value)}; give a number from 0 to {MAX_COST:g}")
    return number


def check_count(name: str, value: float, minimum: int = 0) -> int:
    number = as_float(value)
    if not (number >= minimum and (number == math.inf or number.is_integer())):
        raise InputError(f"{name} is {format_value(value)}; give a whole number, {minimum} or more")
    if number > MAX_COUNT:
        raise InputError(f"{name} is {format_value(value)}; give {MAX_COUNT:,} or less")
    return int(number)
