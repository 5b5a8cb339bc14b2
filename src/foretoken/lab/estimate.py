"""Estimates from a sample, with 95 % intervals.

Tokens of one prompt depend on one another, so the unit of sampling is the prompt: Student's t over
prompts (Liang and Zeger 1986, the linearised ratio). Knows no models and no clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from pydantic import Field
from scipy import special

LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Estimate:
    """A value and the ends of its interval."""

    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """Half the interval; the longer half of one that is cut, or skew."""
        return max(self.high - self.value, self.value - self.low)

    def above(self, other: Estimate) -> bool:
        """Tell whether all of its interval is above the other's: by chance alone once in about 350
        times."""
        return self.low > other.high


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and quartiles of `n` times, in seconds."""

    median: Annotated[float, Field(ge=0)]
    q1: float
    q3: float
    n: Annotated[int, Field(ge=1)]

    @property
    def error(self) -> float:
        """About half of the median's 95 % interval (McGill, Tukey and Larsen 1978)."""
        return 1.57 * (self.q3 - self.q1) / math.sqrt(self.n)


def spread(values: Sequence[float]) -> Spread | None:
    """None where there are no values."""
    if not values:
        return None
    q1, median, q3 = np.quantile(np.asarray(values, dtype=np.float64), (0.25, 0.5, 0.75)).tolist()
    return Spread(median, q1, q3, len(values))


def ratio(
    tops: Sequence[float],
    bottoms: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
) -> Estimate | None:
    """sum tops / sum bottoms, one of each per prompt; the interval is cut to [low, high].

    Student's t over prompts, on the residuals tops - value x bottoms. None where the bottoms are
    all 0 or there are fewer than two prompts.
    """
    top, bottom = np.asarray(tops, dtype=np.float64), np.asarray(bottoms, dtype=np.float64)
    n, total = len(top), float(bottom.sum())
    if n < 2 or total == 0:
        return None
    value = float(top.sum()) / total
    residuals = top - value * bottom
    error = student(n - 1) * math.sqrt(n / (n - 1) * float(residuals @ residuals)) / total
    return Estimate(value, max(low, value - error), min(high, value + error))


def mean(values: Sequence[float]) -> Estimate | None:
    """The mean over prompts."""
    return ratio(values, [1.0] * len(values))


def student(df: int) -> float:
    """The t that |T| stays below with 95 %."""
    return float(special.stdtrit(df, (1 + LEVEL) / 2))


def wilson(hits: int, trials: int) -> Estimate | None:
    """The share of hits in independent trials (Wilson 1927); None without trials."""
    if not trials:
        return None
    z2, rate = 1.959964**2, hits / trials
    centre = (rate + z2 / (2 * trials)) / (1 + z2 / trials)
    error = math.sqrt(z2 * (rate * (1 - rate) / trials + z2 / (4 * trials**2))) / (1 + z2 / trials)
    return Estimate(rate, max(0.0, centre - error), min(1.0, centre + error))
