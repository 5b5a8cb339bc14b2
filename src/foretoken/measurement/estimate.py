"""Statistics: estimates from a sample with 95 % intervals, and a certificate's tests: exact odds of
counts and of uniform numbers, and what evidence could have shown.

Tokens of one prompt depend on one another, so the unit of sampling is the prompt: Student's t over
prompts (Liang and Zeger 1986, the linearised ratio). Knows no models and no clocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from scipy import special
from torch import Tensor

CONFIDENCE_LEVEL = 0.95


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

    def is_above(self, other: Estimate) -> bool:
        """Tell whether all of its interval is above the other's: by chance alone once in about 350
        times."""
        return self.low > other.high


def estimate_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
) -> Estimate | None:
    """sum tops / sum bottoms, one of each per prompt; the interval is cut to [low, high].

    Student's t over prompts, on the residuals tops - value x bottoms. None where the bottoms are
    all 0 or there are fewer than two prompts.
    """
    top, bottom = (
        np.asarray(numerators, dtype=np.float64),
        np.asarray(denominators, dtype=np.float64),
    )
    n, total = len(top), float(bottom.sum())
    if n < 2 or total == 0:
        return None
    value = float(top.sum()) / total
    residuals = top - value * bottom
    error = compute_student_t(n - 1) * math.sqrt(n / (n - 1) * float(residuals @ residuals)) / total
    return Estimate(value, max(low, value - error), min(high, value + error))


def estimate_mean(values: Sequence[float]) -> Estimate | None:
    """The mean over prompts."""
    return estimate_ratio(values, [1.0] * len(values))


def compute_student_t(df: int) -> float:
    """The t that |T| stays below with 95 %."""
    return float(special.stdtrit(df, (1 + CONFIDENCE_LEVEL) / 2))


TEST_POWER = 0.99
MIN_CELL_COUNT = 10  # cells with smaller counts are pooled, for the chi-square approximation


@dataclass(frozen=True, slots=True)
class HypothesisTest:
    """A hypothesis that should hold, tested.

    `p_value`: how often chance alone deviates as much. `catches`: the smallest total variation that
    it finds with a chance of POWER, whatever its shape within the cells; None where it finds none.
    """

    name: str
    of: str  # of what the sample consists: tokens, texts, guesses
    n: int
    p_value: float
    catches: float | None = None


def chi_square_tail(x: float, dof: float) -> float:
    """P(chi-square with `dof` degrees of freedom > x)."""
    return float(special.chdtrc(dof, max(0.0, x)))


def normal_tails(z: float) -> float:
    """P(|a standard normal| > |z|)."""
    return math.erfc(abs(z) / math.sqrt(2))


def compute_noncentrality(dof: int, level: float) -> float:
    """The noncentrality at which a chi-square test at `level` rejects with a chance of POWER.

    A total variation t within the cells has a noncentrality of 4 t^2 n or more (Cauchy-Schwarz),
    with nm / (n + m) for n where there are two samples.
    """
    return float(special.chndtrinc(special.chdtri(dof, level), dof, 1 - TEST_POWER))


def run_uniformity_test(
    name: str, unit: str, u: Tensor, level: float, bins: int = 32
) -> HypothesisTest:
    """Test whether the numbers `u [n]` are uniform on [0, 1)."""
    n = len(u)
    bins = max(2, min(bins, n // MIN_CELL_COUNT))
    counts = torch.bincount((u * bins).long().clamp(0, bins - 1), minlength=bins).double()
    statistic = float(((counts - n / bins) ** 2).sum() / (n / bins))
    min_variation = min(1.0, math.sqrt(compute_noncentrality(bins - 1, level) / (4 * n)))
    return HypothesisTest(name, unit, n, chi_square_tail(statistic, bins - 1), min_variation)


def run_frequency_test(
    name: str, unit: str, hits: Tensor, chances: Tensor, level: float
) -> HypothesisTest:
    """Test whether events `hits [n]` are as frequent as `chances [n]`, each given the past,
    imply."""
    variance = float((chances * (1 - chances)).sum())
    if variance < MIN_CELL_COUNT:
        return HypothesisTest(name, unit, len(hits), 1.0)
    z = float((hits - chances).sum()) / math.sqrt(variance)
    min_z = -special.ndtri(level / 2) + special.ndtri(TEST_POWER)
    return HypothesisTest(
        name, unit, len(hits), normal_tails(z), min(1.0, min_z * math.sqrt(variance) / len(hits))
    )


def run_correlation_test(name: str, unit: str, u: Sequence[Tensor], lags: int) -> HypothesisTest:
    """Test whether the uniform numbers of each row are uncorrelated with those up to `lags`
    before."""
    statistic, n = 0.0, sum(map(len, u))
    pairs = [
        [(12 * (row[lag:] - 0.5) * (row[: len(row) - lag] - 0.5)) for row in u if len(row) > lag]
        for lag in range(1, lags + 1)
    ]
    by_lag = [torch.cat(products) for products in pairs if products]
    for products in by_lag:
        statistic += float(products.sum()) ** 2 / len(products)
    return HypothesisTest(name, unit, n, chi_square_tail(statistic, max(1, len(by_lag))))


def run_two_sample_test(
    name: str, unit: str, tables: Sequence[tuple[np.ndarray, np.ndarray]], level: float
) -> HypothesisTest:
    """Test whether the counts of every pair of `tables` come from one distribution; the pairs are
    pooled."""
    statistic, dof, n, m = 0.0, 0, 0.0, 0.0
    for a, b in tables:
        a, b = _pool_cells(a, b)
        n, m = n + a.sum(), m + b.sum()
        weight = math.sqrt(b.sum() / a.sum())
        statistic += float(((weight * a - b / weight) ** 2 / (a + b)).sum())
        dof += len(a) - 1
    if not dof:
        return HypothesisTest(name, unit, int(n), 1.0)
    min_variation = min(1.0, math.sqrt(compute_noncentrality(dof, level) / (4 * n * m / (n + m))))
    return HypothesisTest(name, unit, int(n), chi_square_tail(statistic, dof), min_variation)


def _pool_cells(a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Cells with few counts are merged into one."""
    few = (a + b) < 2 * MIN_CELL_COUNT
    rest = [[counts[few].sum()] if few.any() else [] for counts in (a, b)]
    a, b = (np.concatenate([c[~few], r]) for c, r in zip((a, b), rest, strict=True))
    return a[a + b > 0], b[a + b > 0]


@dataclass(frozen=True, slots=True)
class TokenUniforms:
    """The numbers of some tokens, `[n]` each, float64."""

    ranked: Tensor  # likeliest tokens first: shows a distribution that is too sharp or too flat
    by_id: Tensor  # in the order of the ids: shows random numbers that were used twice


def compute_uniforms(distribution: Tensor, tokens: Tensor, noise: Tensor) -> TokenUniforms:
    """The numbers of `tokens [n]` under `distribution [n, V]`; `noise [n]` is uniform and fresh.

    A token without mass gets the very end of the ranks.
    """
    p = distribution.double()
    p = p / p.sum(-1, keepdim=True)
    masses = p.gather(1, tokens[:, None])
    ids = torch.arange(p.shape[1], device=p.device)
    equals = p.where(p == masses, 0.0).sum(-1)
    ranked = p.where(p > masses, 0.0).sum(-1) + noise * equals
    by_id = p.where(ids < tokens[:, None], 0.0).sum(-1) + noise * masses[:, 0]
    return TokenUniforms(ranked.cpu(), by_id.cpu())
