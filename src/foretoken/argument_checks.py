"""Checks of distributions and numbers from callers. An InputError names the invalid argument."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.errors import InputError, format_value, to_float

Distribution = NDArray[np.float64]
MAX_COUNT = 1_000_000  # tokens: a longer table would not fit in memory
MAX_COST = 1e100  # MAX_COST * MAX_COUNT is still finite
MIN_LENIENCE = 1e-30  # 1 / MIN_LENIENCE is still finite in float32


def check_distributions(p: ArrayLike, q: ArrayLike) -> tuple[Distribution, Distribution]:
    """Return p and q as float64 arrays `[V]`. Raises InputError unless both are distributions of
    the same size."""
    p, q = check_distribution("p", p), check_distribution("q", q)
    if p.size != q.size:
        raise InputError(
            f"p has {p.size} tokens, but q has {q.size}; give distributions over the same tokens"
        )
    return p, q


def check_distribution(name: str, values: ArrayLike) -> Distribution:
    """Return a float64 array `[V]`. Raises InputError unless `values` are a distribution."""
    masses = to_array(name, values)
    if masses.ndim != 1:
        raise InputError(f"{name} has shape {masses.shape}; give one distribution, of shape (V,)")
    invalid = np.flatnonzero(~((masses >= 0) & (masses < math.inf)))
    if invalid.size:
        i = int(invalid[0])
        raise InputError(
            f"{name} has the probability {masses[i]} for token {i}; give numbers of 0 or more"
        )
    total = masses.sum()
    if not abs(total - 1) < 1e-4:  # a float32 distribution carries the rounding of many terms
        raise InputError(f"{name} sums to {total:g}; give a distribution, which sums to 1")
    return masses


def to_array(name: str, values: ArrayLike) -> Distribution:
    """Return `values` as a float64 array. Raises InputError unless all are numbers."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # ragged lists, strings, huge integers
        raise InputError(f"{name} is {format_value(values)}; give an array of numbers") from None


def check_probability(name: str, value: float) -> float:
    number = to_float(value)
    if not 0 <= number <= 1:
        raise InputError(f"{name} is {format_value(value)}; give a number in [0, 1]")
    return number


def check_lenience(value: float) -> float:
    number = to_float(value)
    if not MIN_LENIENCE <= number <= 1:
        raise InputError(
            f"lenience is {format_value(value)}; give a number from {MIN_LENIENCE:g} to 1 "
            "(1: exact)"
        )
    return number


def check_cost(name: str, value: float) -> float:
    number = to_float(value)
    if not 0 <= number <= MAX_COST:
        raise InputError(f"{name} is {format_value(value)}; give a number from 0 to {MAX_COST:g}")
    return number


def check_count(name: str, value: float, minimum: int = 0) -> int:
    number = to_float(value)
    if not (number >= minimum and (number == math.inf or number.is_integer())):
        raise InputError(f"{name} is {format_value(value)}; give a whole number, {minimum} or more")
    if number > MAX_COUNT:
        raise InputError(f"{name} is {format_value(value)}; give {MAX_COUNT:,} or less")
    return int(number)
