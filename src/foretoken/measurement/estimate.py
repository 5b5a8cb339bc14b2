"""Statistics: estimates with 95 % confidence intervals, and the hypothesis tests of a certificate
with their p-values and power.

Tokens of one prompt are dependent, so the unit of sampling is the prompt. The intervals are
Student's t intervals over prompts, for the linearised ratio (Liang and Zeger 1986).
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
    """An estimated value with its confidence interval, [low, high]."""

    value: float
    low: float
    high: float

    @property
    def error(self) -> float:
        """The distance from the value to the farther end of the interval."""
        return max(self.high - self.value, self.value - self.low)

    def is_above(self, other: Estimate) -> bool:
        """Return whether the whole interval is above the interval of `other`. If the true values
        are equal, this happens by chance about once in 350 times."""
        return self.low > other.high


def estimate_ratio(
    numerators: Sequence[float],
    denominators: Sequence[float],
    low: float = -math.inf,
    high: float = math.inf,
) -> Estimate | None:
    """Estimate the ratio (sum of numerators) / (sum of denominators). Return None if the
    denominators sum to 0 or there are fewer than two prompts.

    The interval is a Student's t interval over the prompts' residuals, numerator - value x
    denominator.

    Args:
        numerators: One number for each prompt.
        denominators: One number for each prompt.
        low: Lower limit to which the interval is cut.
        high: Upper limit to which the interval is cut.
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
    """Estimate the mean of `values`, one for each prompt. Return None for fewer than two
    prompts."""
    return estimate_ratio(values, [1.0] * len(values))


def compute_student_t(df: int) -> float:
    """Return the t for which P(|T| < t) is 95 %, with `df` degrees of freedom."""
    return float(special.stdtrit(df, (1 + CONFIDENCE_LEVEL) / 2))


TEST_POWER = 0.99
MIN_CELL_COUNT = 10  # cells with smaller counts are pooled, for the chi-square approximation


@dataclass(frozen=True, slots=True)
class HypothesisTest:
    """The result of a hypothesis test.

    Attributes:
        name: Name of the test.
        of: Unit of the sample: tokens, outputs or draft tokens.
        n: Size of the sample.
        p_value: Probability of a deviation at least this large if the hypothesis is true.
        catches: The smallest total variation (over the test's cells) that the test detects with
            probability TEST_POWER; None: unknown.
    """

    name: str
    of: str
    n: int
    p_value: float
    catches: float | None = None


def chi_square_tail(x: float, dof: float) -> float:
    """Return P(chi-square with `dof` degrees of freedom > x)."""
    return float(special.chdtrc(dof, max(0.0, x)))


def normal_tails(z: float) -> float:
    """Return P(|Z| > |z|) of a standard normal Z."""
    return math.erfc(abs(z) / math.sqrt(2))


def compute_noncentrality(dof: int, level: float) -> float:
    """Return the noncentrality at which a chi-square test at the significance `level` rejects with
    probability TEST_POWER.

    A total variation t over the cells has a noncentrality of at least 4 t^2 n (Cauchy-Schwarz) for
    a sample of size n. For two samples of sizes n and m, replace n by nm / (n + m).
    """
    return float(special.chndtrinc(special.chdtri(dof, level), dof, 1 - TEST_POWER))


def run_uniformity_test(
    name: str, unit: str, u: Tensor, level: float, bins: int = 32
) -> HypothesisTest:
    """Test whether the numbers `u [n]` are uniform on [0, 1). `level`: significance level, from
    which `catches` is computed."""
    n = len(u)
    bins = max(2, min(bins, n // MIN_CELL_COUNT))
    counts = torch.bincount((u * bins).long().clamp(0, bins - 1), minlength=bins).double()
    statistic = float(((counts - n / bins) ** 2).sum() / (n / bins))
    min_variation = min(1.0, math.sqrt(compute_noncentrality(bins - 1, level) / (4 * n)))
    return HypothesisTest(name, unit, n, chi_square_tail(statistic, bins - 1), min_variation)


def run_frequency_test(
    name: str, unit: str, hits: Tensor, chances: Tensor, level: float
) -> HypothesisTest:
    """Test whether the events `hits [n]`, each 0 or 1, are as frequent as their conditional
    probabilities `chances [n]` predict."""
    variance = float((chances * (1 - chances)).sum())
    if variance < MIN_CELL_COUNT:
        return HypothesisTest(name, unit, len(hits), 1.0)
    z = float((hits - chances).sum()) / math.sqrt(variance)
    min_z = -special.ndtri(level / 2) + special.ndtri(TEST_POWER)
    return HypothesisTest(
        name, unit, len(hits), normal_tails(z), min(1.0, min_z * math.sqrt(variance) / len(hits))
    )


def run_correlation_test(name: str, unit: str, u: Sequence[Tensor], lags: int) -> HypothesisTest:
    """Test whether uniform numbers at distances from 1 to `lags` in a tensor are uncorrelated."""
    statistic, n = 0.0, sum(map(len, u))
    pairs = [
        [(12 * (x[lag:] - 0.5) * (x[: len(x) - lag] - 0.5)) for x in u if len(x) > lag]
        for lag in range(1, lags + 1)
    ]
    by_lag = [torch.cat(products) for products in pairs if products]
    for products in by_lag:
        statistic += float(products.sum()) ** 2 / len(products)
    return HypothesisTest(name, unit, n, chi_square_tail(statistic, max(1, len(by_lag))))


def run_two_sample_test(
    name: str, unit: str, tables: Sequence[tuple[np.ndarray, np.ndarray]], level: float
) -> HypothesisTest:
    """Test whether in each table the two arrays of counts come from the same distribution. One
    chi-square statistic is summed over all tables."""
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
    """Return the counts with all cells of small counts merged into one cell, and without empty
    cells."""
    few = (a + b) < 2 * MIN_CELL_COUNT
    rest = [[counts[few].sum()] if few.any() else [] for counts in (a, b)]
    a, b = (np.concatenate([c[~few], r]) for c, r in zip((a, b), rest, strict=True))
    return a[a + b > 0], b[a + b > 0]


@dataclass(frozen=True, slots=True)
class TokenUniforms:
    """For n sampled tokens, numbers that are uniform on [0, 1) if the tokens have the distribution
    that they should have; `[n]`, float64.

    A token's number is drawn uniformly from the interval that its probability occupies in the
    cumulative distribution. The two tensors differ in the order of the tokens in that distribution.
    """

    ranked: Tensor  # by falling probability: detects distributions that are too sharp or too flat
    by_id: Tensor  # by id: detects random numbers that were used twice


def compute_uniforms(distribution: Tensor, tokens: Tensor, noise: Tensor) -> TokenUniforms:
    """Return the uniform numbers of sampled tokens.

    Args:
        distribution: `[n, V]`, the distribution that each token should have.
        tokens: `[n]`, the sampled ids.
        noise: `[n]`, independent uniform numbers, which choose a point in each token's interval.

    A token of probability 0 gets the number 1 in `ranked`.
    """
    p = distribution.double()
    p = p / p.sum(-1, keepdim=True)
    masses = p.gather(1, tokens[:, None])
    ids = torch.arange(p.shape[1], device=p.device)
    equals = p.where(p == masses, 0.0).sum(-1)
    ranked = p.where(p > masses, 0.0).sum(-1) + noise * equals
    by_id = p.where(ids < tokens[:, None], 0.0).sum(-1) + noise * masses[:, 0]
    return TokenUniforms(ranked.cpu(), by_id.cpu())
