"""What formulas take, as given: laws and numbers, or an InputError that names what is none.

Knows no formula.
"""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import ArrayLike, NDArray

from foretoken.errors import InputError, real

Law = NDArray[np.float64]
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
    found = np.asarray(values, dtype=np.float64)
    if found.ndim != 1:
        raise InputError(f"{name} has shape {found.shape}; give one law, of shape (V,)")
    if not (found >= 0).all():
        raise InputError(f"{name} has a probability of {found.min()}; give none below 0")
    if not abs(found.sum() - 1) < 1e-4:  # float32 laws are sums of many roundings
        raise InputError(f"{name} sums to {found.sum()}; give a law, which sums to 1")
    return found


def probability(name: str, value: float) -> float:
    if not 0 <= value <= 1:
        raise InputError(f"{name} is {value}; give a number in [0, 1]")
    return value


def lenience(value: float) -> float:
    if not real(value) or not LEAST <= value <= 1:
        raise InputError(
            f"lenience is {value!r:.60}; give a number from {LEAST:g} to 1, 1 being exact"
        )
    return value


def cost(name: str, value: float) -> float:
    if not 0 <= value < math.inf:
        raise InputError(f"{name} is {value}; give a finite number, 0 or more")
    return value


def count(name: str, value: float, least: int = 0) -> int:
    if not (value >= least and float(value).is_integer()):
        raise InputError(f"{name} is {value}; give a whole number, {least} or more")
    return int(value)
