"""Distributions over any finite set, and the rule that makes one sample of several distinct
guesses.

The paper's rule for one position (section 2.3), with recursive rejection without replacement for
more than one guess (Sequoia, arXiv 2402.12374). Pure: `sample_law` gives a distribution and draws
nothing. Knows no models, no clocks and no threads.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken import checked
from foretoken.errors import InputError

Masses = NDArray[np.float64]


class Distribution(NamedTuple):
    """A distribution over a finite set.

    Attributes:
        outcomes: The outcomes; range(V) where the distribution came as an array.
        masses: Their probabilities, `[V]`, sum 1.

    Examples:
        >>> import numpy
        >>> Distribution(range(2), numpy.array([0.5, 0.5])).masses.sum()
        np.float64(1.0)
    """

    outcomes: Sequence[Hashable]
    masses: Masses


EMPTY = Distribution((), np.zeros(0))  # in place of q where no guesses are drawn


class SampleDistribution(NamedTuple):
    """The distribution of the sample, given the guesses: one of them, or else a draw from
    `residual`."""

    kept: Masses  # [k+1]: the probability that guess i is the sample; the last entry: none is
    residual: Masses  # [V]: the distribution of the sample if no guess is
    beta: float  # the probability that one is kept, the mean over the last guess


def finite_distribution(owner: str, value: Any) -> Distribution:
    """The distribution in a dict {outcome: probability}, or in an array, tensor or list `[V]` of
    the outcomes 0..V-1, scaled to sum to 1 in float64. Raises InputError as `checked.distribution`
    does."""
    if isinstance(value, Mapping):
        outcomes, masses = list(value), _masses(owner, list(value.values()))
    else:
        masses = _masses(owner, value)
        outcomes = range(masses.size)
    masses = checked.distribution(f"{owner}'s law", masses, outcomes)
    return Distribution(outcomes, masses / masses.sum())


def _masses(owner: str, values: Any) -> Masses:
    """The numbers `[V]` of a distribution, not yet checked to be one."""
    try:
        if hasattr(values, "detach"):  # a tensor, on any device: torch itself is not imported
            values = values.detach().cpu()
            values = values.double() if values.is_floating_point() else values.tolist()
        masses = np.asarray(values)
        real = masses.dtype.kind in "biufO"  # no texts, dates or complex numbers
        masses = masses.astype(np.float64) if real else np.zeros(())
    except (TypeError, ValueError):
        masses = np.zeros(())
    if masses.ndim != 1:
        raise InputError(
            f"{owner} gives {' '.join(repr(values).split()):.60}; "
            "give a law: a dict of probabilities, or an array (V,)"
        )
    return masses


def together(q: Distribution, p: Distribution) -> tuple[Sequence[Hashable], Masses, Masses]:
    """The outcomes of both, q's first and in q's order, with q and p over them."""
    if q.outcomes == p.outcomes:
        return q.outcomes, q.masses, p.masses
    outcomes = list(dict.fromkeys([*q.outcomes, *p.outcomes]))
    tables = [
        dict(zip(distribution.outcomes, distribution.masses.tolist(), strict=True))
        for distribution in (q, p)
    ]
    wide = [
        np.array([distribution.get(outcome, 0.0) for outcome in outcomes])
        for distribution in tables
    ]
    return outcomes, wide[0], wide[1]


def sample_distribution(p: Masses, q: Masses, guesses: Sequence[int]) -> SampleDistribution:
    """The distribution of the sample, given distinct guesses drawn one after the other from q
    without replacement.

    p, q: distributions `[V]`. Guess x is kept with probability min(1, p(x)/q(x)); else p becomes
    norm((p - q)+), q loses x, and the next guess is judged likewise. Over all guesses the sample
    has the distribution p, whatever q is. The residual gives rejected guesses no probability.
    """
    masses, rest, beta = [], 1.0, 0.0
    for x in guesses:
        beta = 1 - rest * (1 - float(np.minimum(p, q).sum()))
        accept = min(1.0, float(p[x] / q[x]))
        masses.append(rest * accept)
        rest *= 1 - accept
        if rest > 0:
            p, q = normalized(np.maximum(p - q, 0.0), otherwise=p), without(q, x)
    return SampleDistribution(np.array([*masses, rest]), p, min(1.0, beta))


def without(q: Masses, x: int) -> Masses:
    """q given that the outcome is not x; all zeros where no other is possible."""
    rest = q.copy()
    rest[x] = 0.0
    return normalized(rest, otherwise=rest)


def normalized(masses: Masses, otherwise: Masses) -> Masses:
    total = masses.sum()
    return masses / total if total > 0 else otherwise


def pick(masses: Masses, uniform: float) -> int:
    """Inverse CDF: the index that a number in [0, 1) picks, never one of zero mass."""
    cdf = masses.cumsum()
    level = min(uniform * cdf[-1], np.nextafter(cdf[-1], 0.0))
    return int(np.searchsorted(cdf, level, side="right"))
