"""What formulas take, as given: laws and numbers, or an InputError that names what is none.

Knows no formula.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.errors import InputError, as_float, shown

Law = NDArray[np.float64]
MOST = 1_000_000  # guesses or tokens: a table of more has no room
DEAREST = 1e100  # a cost: times so many guesses it is still a float
LEAST = 1e-30  # a lenience: a probability in float32 divided by it is one, too


def laws(p: ArrayLike, q: ArrayLike) -> tuple[Law, Law]:
    """Two, `[V]` each, over the same tokens."""
    one, other = law("p", p), law("q", q)
    if one.size != other.size:
        raise InputError(
            f"p has {one.size} tokens and q {other.size}; give laws over the same tokens"
        )
    return one, other


def law(name: str, values: ArrayLike) -> Law:
    """One, `[V]`."""
    found = numbers(name, values)
    if found.ndim != 1:
        raise InputError(f"{name} has shape {found.shape}; give one law, of shape (V,)")
    if not (found >= 0).all():
        raise InputError(f"{name} has a probability of {found.min()}; give none below 0")
    if not abs(found.sum() - 1) < 1e-4:  # float32 laws are sums of many roundings
        raise InputError(f"{name} sums to {found.sum()}; give a law, which sums to 1")
    return found


def numbers(name: str, values: ArrayLike) -> Law:
    """An array in float64."""
    try:
        return np.asarray(values, dtype=np.float64)
    except (TypeError, ValueError, OverflowError):  # ragged, text, or beyond a float
        raise InputError(f"{name} is {shown(values)}; give an array of numbers") from None


def probability(name: str, value: float) -> float:
    found = as_float(value)
    if not 0 <= found <= 1:
        raise InputError(f"{name} is {shown(value)}; give a number in [0, 1]")
    return found


def lenience(value: float) -> float:
    found = as_float(value)
    if not LEAST <= found <= 1:
        raise InputError(
            f"lenience is {shown(value)}; give a number from {LEAST:g} to 1, 1 being exact"
        )
    return found


def cost(name: str, value: float) -> float:
    found = as_float(value)
    if not 0 <= found <= DEAREST:
        raise InputError(f"{name} is {shown(value)}; give a number from 0 to {DEAREST:g}")
    return found


def count(name: str, value: float, least: int = 0) -> int:
    found = as_float(value)
    if not (found >= least and (found == math.inf or found.is_integer())):
        raise InputError(f"{name} is {shown(value)}; give a whole number, {least} or more")
    if found > MOST:
        raise InputError(f"{name} is {shown(value)}; give {MOST:,} or less")
    return int(found)
