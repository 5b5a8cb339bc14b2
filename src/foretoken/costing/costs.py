"""Costs of a step on one pair and one machine, in seconds.

Measured from step records, then frozen: gamma follows from it, and no clock that runs during
generation may influence the text. Knows no engine, no policy and no disk.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise
from math import isfinite
from statistics import median_low
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.records import StepRecord
from foretoken.sampling.distributions import SamplingParams

MIN_FORWARD_SECONDS = 1e-9  # seconds: the least that a pass takes, whatever a coarse clock says

DEFAULT_PARAMS = SamplingParams()
Numbers = int | float | NDArray[Any]
CostTable = tuple[tuple[int, float], ...]  # ascending; linear between and beyond its points


@dataclass(frozen=True, slots=True)
class LongContextCosts:
    """The same parts of a step behind a longer text: attention to it takes time, of some kernels
    far more for several tokens than for one."""

    context: int  # tokens of the text
    draft: CostTable
    score: CostTable


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step's three parts, and the acceptance expected of a new row."""

    draft: CostTable  # by the number of draft tokens, for one row
    score: CostTable  # the target's pass, by the tokens of all rows
    verify: CostTable  # what follows the pass, by the same tokens
    rows: CostTable = ((1, 1.0),)  # a draft for so many rows, relative to one row
    prior: tuple[float, float] = (3.0, 0.8)  # weight, in draft tokens, and alpha
    change: float = 0.0  # what a pass takes more where its size is another than that of the last
    context: int = 0  # tokens of the text behind which all these were measured
    far: LongContextCosts | None = None

    @property
    def is_valid(self) -> bool:
        """True where these can be costs, wherever they were read from."""
        weight, alpha = self.prior
        single = ((0, self.change),)
        # rates are divided by the time of a pass
        positive = weight > 0 and all(value > 0 for _, value in (*self.score, *self.rows))
        tables = self.draft, self.score, self.verify, self.rows, single
        if self.far is not None:
            tables += self.far.draft, self.far.score
            positive = positive and self.far.context > self.context
        return positive and 0 <= alpha <= 1 and all(map(is_valid_table, tables))

    @property
    def without_draft_seconds(self) -> Costs:
        """Where draft tokens cost nothing to make."""
        return replace(self, draft=((0, 0.0),))

    def step_seconds(self, gamma: int, batch_size: int = 1) -> float:
        """A step in which each of `rows` rows makes `gamma` guesses."""
        n = batch_size * (gamma + 1)
        return float(
            self.draft_seconds(gamma, batch_size * gamma, batch_size) + self.target_seconds(n, n)
        )

    def draft_seconds(self, depth: Numbers, num_draft_tokens: Numbers, batch_size: int) -> Numbers:
        """A draft of so many draft tokens, `depth` of them for the row that has most of `rows`."""
        share = (interpolate(self.rows, batch_size) - 1) / max(
            1, batch_size - 1
        )  # of a pass, for every row but one
        extra = np.maximum(num_draft_tokens / np.maximum(depth, 1) - 1, 0)
        return interpolate(self.draft, depth) * (1 + share * extra)

    def target_seconds(self, positions: Numbers, num_verified: Numbers) -> Numbers:
        """The target's pass, and what follows it for the positions that are judged."""
        return interpolate(self.score, positions) + interpolate(self.verify, num_verified)

    @property
    def c(self) -> float:
        """T_q / T_p (Definition 3.7), T_q from the longest draft; 0 without a measured draft."""
        longest, seconds = self.draft[-1]
        return float(seconds / longest / interpolate(self.score, 1)) if longest else 0.0

    def v(self, n: int) -> float:
        """A pass over n tokens and what follows it, relative to plain decoding."""
        plain = interpolate(self.score, 1) + interpolate(self.verify, 1)
        return float((interpolate(self.score, n) + interpolate(self.verify, n)) / plain)

    def extend_to_batch(
        self, steps: list[StepRecord], num_draft_tokens: list[int], batch_size: int
    ) -> Costs:
        """These costs, extended by steps of `rows` rows, as one of the rows that guessed most tells
        of them, with so many `draft_tokens` of all in each."""
        positions = [batch_size + count for count in num_draft_tokens]
        score = dict(self.score) | dict(_compute_medians("score_seconds", steps, positions))
        verify = dict(self.verify) | dict(_compute_medians("verify_seconds", steps, positions))
        longest, seconds = _compute_medians(
            "draft_seconds", steps, [step.drafted for step in steps]
        )[-1]
        drafting = interpolate(self.draft, longest)
        ratio = max(1.0, seconds / drafting) if longest and drafting > 0 else 1.0
        return replace(
            self,
            score=_make_rising(score),
            verify=tuple(sorted(verify.items())),
            rows=((1, 1.0), (batch_size, float(ratio))),
        )


@lru_cache(256)
def costs_at_context(costs: Costs, context: int, batch_size: int = 1) -> Costs:
    """The costs of steps of `rows` rows behind texts of so many tokens: in proportion, by those
    behind a longer text."""
    short, long = costs, costs.far
    if long is None or context <= short.context:
        return costs
    share = (context - short.context) / (long.context - short.context)

    def more(there: CostTable, here: CostTable, x: float) -> float:
        return share * max(0.0, float(interpolate(there, x) - interpolate(here, x)))

    score = (
        (n, t + batch_size * more(long.score, short.score, max(1, n / batch_size)))
        for n, t in short.score
    )
    draft = ((n, t + more(long.draft, short.draft, n)) for n, t in short.draft)
    return replace(short, score=_make_rising(dict(score)), draft=tuple(draft))


def costs_from_steps(steps: list[StepRecord]) -> Costs:
    """Costs from steps of one row, at least one."""
    draft_tokens = [step.drafted for step in steps]
    positions = [1 + count for count in draft_tokens]
    return Costs(
        draft=_compute_medians("draft_seconds", steps, draft_tokens),
        score=_make_rising(dict(_compute_medians("score_seconds", steps, positions))),
        verify=_compute_medians("verify_seconds", steps, positions),
    )


def _make_rising(table: dict[int, float]) -> CostTable:
    """A pass takes no longer than a larger one: one that seems to was disturbed, and is told from
    those around it. With the larger one's time, draft tokens in between would seem free."""
    sizes, rising = sorted(table), list[int]()
    for n in reversed(sizes):
        if not rising or table[n] <= table[rising[-1]]:
            rising.append(n)
    rising.reverse()
    times = [max(table[n], MIN_FORWARD_SECONDS) for n in rising]
    if rising[0] > sizes[0] and len(rising) > 1:
        slope = (times[1] - times[0]) / (rising[1] - rising[0])
        proportional = (
            times[0] * sizes[0] / rising[0]
        )  # a token of a pass takes no less in a smaller one
        times.insert(
            0, max(MIN_FORWARD_SECONDS, proportional, times[0] - slope * (rising[0] - sizes[0]))
        )
        rising.insert(0, sizes[0])
    return tuple(zip(sizes, np.interp(sizes, rising, times).tolist(), strict=True))


def _compute_medians(name: str, steps: list[StepRecord], sizes: list[int]) -> CostTable:
    """The medians of what steps of each size took."""
    groups: dict[int, list[float]] = {}
    for step, size in zip(steps, sizes, strict=True):
        groups.setdefault(size, []).append(getattr(step, name))
    return tuple((size, median_low(groups[size])) for size in sorted(groups))


def interpolate(table: CostTable, x: Numbers) -> Numbers:
    """The table at x, continued beyond its end with the slope of its last half, but never falling:
    between its last two points alone, noise would be the slope."""
    sizes, values = zip(*table, strict=True)
    half = max(0, bisect_right(sizes, sizes[-1] / 2) - 1)
    more = sizes[-1] - sizes[half]
    slope = (values[-1] - values[half]) / more if more else 0.0
    return np.interp(x, sizes, values) + max(0.0, slope) * np.maximum(x - sizes[-1], 0)


SAMPLING_KINDS = ("greedy", "sampled")  # of sampling, which cost differently


def sampling_kind(params: SamplingParams) -> str:
    return "greedy" if params.greedy else "sampled"


def select_costliest(params: list[SamplingParams]) -> SamplingParams:
    """The params that cost most, with nothing but how they make a distribution."""
    costliest = max(
        params, key=lambda each: (not each.greedy, each.standard[1:] != DEFAULT_PARAMS.standard[1:])
    )
    return SamplingParams(**costliest.standard._asdict())


def is_valid_table(table: CostTable) -> bool:
    """Tell whether it holds finite seconds, not below 0, by ascending sizes."""
    rising = all(a < b for (a, _), (b, _) in pairwise(table))
    return bool(table) and rising and all(isfinite(value) and value >= 0 for _, value in table)
