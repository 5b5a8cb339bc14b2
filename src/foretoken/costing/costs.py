"""Costs of a step for one pair on one machine, in seconds.

Costs are computed from step records, then frozen: gamma depends on the costs, and a clock that runs
during generation must not influence the output. Imports nothing of the engine, policies or disk.
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

MIN_FORWARD_SECONDS = 1e-9  # a coarse clock may measure 0 for a forward pass

DEFAULT_PARAMS = SamplingParams()
Numbers = int | float | NDArray[Any]
CostTable = tuple[tuple[int, float], ...]  # (size, value) by ascending size; see `interpolate`


@dataclass(frozen=True, slots=True)
class LongContextCosts:
    """Costs of drafting and of the target's forward pass at a longer context. Attention takes more
    time at a longer context; with some kernels, attention for several tokens takes far more time
    than for one token."""

    context: int  # tokens
    draft: CostTable
    score: CostTable
    draft_limit: int | None = None  # context at which drafting stops taking more time; None: never


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step's three parts, and the expected acceptance of a new sequence."""

    draft: CostTable  # the drafter, by the number of draft tokens, for batch size 1
    score: CostTable  # the target's forward pass, by its number of positions, padding included
    verify: CostTable  # verification and commit, by the number of verified positions
    rows: CostTable = ((1, 1.0),)  # draft time by batch size, relative to batch size 1
    prior: tuple[float, float] = (3.0, 0.8)  # (weight of alpha, in draft tokens; alpha)
    change: float = 0.0  # extra seconds of a pass whose size differs from the last pass's
    context: int = 0  # context length, in tokens, at which these costs were measured
    far: LongContextCosts | None = None

    @property
    def is_valid(self) -> bool:
        """True if all numbers are in range; numbers loaded from disk may be out of range."""
        weight, alpha = self.prior
        single = ((0, self.change),)
        # above 0, because they are divisors
        positive = weight > 0 and all(value > 0 for _, value in (*self.score, *self.rows))
        tables = self.draft, self.score, self.verify, self.rows, single
        if self.far is not None:
            tables += self.far.draft, self.far.score
            positive = positive and self.far.context > self.context
        return positive and 0 <= alpha <= 1 and all(map(is_valid_table, tables))

    @property
    def without_draft_seconds(self) -> Costs:
        """A copy of these costs in which drafting takes no time, as with predicted output."""
        return replace(self, draft=((0, 0.0),))

    def with_target_costs(self, costs: Costs) -> Costs:
        """Return these costs with the times of the target's forward passes in `costs`, to compare
        drafters of one target without the noise of two measurements."""
        far = self.far
        if far is not None:
            far = None if costs.far is None else replace(far, score=costs.far.score)
        return replace(self, score=costs.score, change=costs.change, far=far)

    def step_seconds(self, gamma: int, batch_size: int = 1) -> float:
        """Return the seconds of a step with `gamma` draft tokens for each of `batch_size`
        sequences."""
        n = batch_size * (gamma + 1)
        return float(
            self.draft_seconds(gamma, batch_size * gamma, batch_size) + self.target_seconds(n, n)
        )

    def draft_seconds(self, depth: Numbers, num_draft_tokens: Numbers, batch_size: int) -> Numbers:
        """Return the seconds of drafting `num_draft_tokens` tokens in total, at most `depth` tokens
        for each of `batch_size` sequences."""
        # the cost of each further sequence, as a share of the first sequence's cost
        share = (interpolate(self.rows, batch_size) - 1) / max(1, batch_size - 1)
        extra = np.maximum(num_draft_tokens / np.maximum(depth, 1) - 1, 0)
        return interpolate(self.draft, depth) * (1 + share * extra)

    def target_seconds(self, positions: Numbers, num_verified: Numbers) -> Numbers:
        """Return the seconds of the target's pass over `positions` positions and of verifying
        `num_verified` positions."""
        return interpolate(self.score, positions) + interpolate(self.verify, num_verified)

    @property
    def c(self) -> float:
        """The paper's c, T_q / T_p (definition 3.7). T_q is the mean time per token of the longest
        measured draft; c is 0 if no draft was measured."""
        longest, seconds = self.draft[-1]
        return float(seconds / longest / interpolate(self.score, 1)) if longest else 0.0

    def v(self, n: int) -> float:
        """Return the time of a pass over n tokens and their verification, divided by the time for
        one token."""
        plain = interpolate(self.score, 1) + interpolate(self.verify, 1)
        return float((interpolate(self.score, n) + interpolate(self.verify, n)) / plain)

    def extend_to_batch(
        self, steps: list[StepRecord], num_draft_tokens: list[int], batch_size: int
    ) -> Costs:
        """Return these costs, extended by measured steps of this batch size.

        Args:
            steps: The step records of a sequence with the largest gamma in each step.
            num_draft_tokens: Draft tokens of all sequences, for each step.
            batch_size: Sequences in each step.
        """
        verified = [batch_size + count for count in num_draft_tokens]
        computed = [n + step.padding for n, step in zip(verified, steps, strict=True)]
        score = dict(self.score) | dict(_compute_medians("score_seconds", steps, computed))
        verify = dict(self.verify) | dict(_compute_medians("verify_seconds", steps, verified))
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
    """Return the costs at a context length in tokens, by linear interpolation between the two
    measured lengths, and extrapolation beyond the longer length. Below the shorter length, or if
    only one length was measured, return `costs`."""
    short, long = costs, costs.far
    if long is None or context <= short.context:
        return costs
    draft_context = min(context, max(long.draft_limit or context, long.context))

    def more(length: int, there: CostTable, here: CostTable, x: float) -> float:
        share = (length - short.context) / (long.context - short.context)
        return share * max(0.0, float(interpolate(there, x) - interpolate(here, x)))

    score = (
        (n, t + batch_size * more(context, long.score, short.score, max(1, n / batch_size)))
        for n, t in short.score
    )
    draft = ((n, t + more(draft_context, long.draft, short.draft, n)) for n, t in short.draft)
    return replace(short, score=_make_rising(dict(score)), draft=tuple(draft))


def costs_from_steps(steps: list[StepRecord]) -> Costs:
    """Compute the costs from the records of one or more steps of batch size 1."""
    draft_tokens = [step.drafted for step in steps]
    verified = [1 + count for count in draft_tokens]
    computed = [n + step.padding for n, step in zip(verified, steps, strict=True)]
    return Costs(
        draft=_compute_medians("draft_seconds", steps, draft_tokens),
        score=_make_rising(dict(_compute_medians("score_seconds", steps, computed))),
        verify=_compute_medians("verify_seconds", steps, verified),
    )


def _make_rising(table: dict[int, float]) -> CostTable:
    """Return the table with values that never fall as the size grows. A pass that took longer than
    a larger pass was disturbed, so its time is interpolated from the neighbouring sizes. With the
    larger pass's time instead, the draft tokens between the two sizes would seem free."""
    sizes, rising = sorted(table), list[int]()
    for n in reversed(sizes):
        if not rising or table[n] <= table[rising[-1]]:
            rising.append(n)
    rising.reverse()
    times = [max(table[n], MIN_FORWARD_SECONDS) for n in rising]
    if rising[0] > sizes[0] and len(rising) > 1:
        slope = (times[1] - times[0]) / (rising[1] - rising[0])
        # the time per token is no lower in a smaller pass
        proportional = times[0] * sizes[0] / rising[0]
        times.insert(
            0, max(MIN_FORWARD_SECONDS, proportional, times[0] - slope * (rising[0] - sizes[0]))
        )
        rising.insert(0, sizes[0])
    return tuple(zip(sizes, np.interp(sizes, rising, times).tolist(), strict=True))


def _compute_medians(name: str, steps: list[StepRecord], sizes: list[int]) -> CostTable:
    """Return the median of the field `name` of the steps for each size; `sizes[i]` is the size of
    step i."""
    groups: dict[int, list[float]] = {}
    for step, size in zip(steps, sizes, strict=True):
        groups.setdefault(size, []).append(getattr(step, name))
    return tuple((size, median_low(groups[size])) for size in sorted(groups))


def interpolate(table: CostTable, x: Numbers) -> Numbers:
    """Return the table's value at x, linear between its points. Beyond the last point, continue
    with the slope of the upper half of the sizes, or slope 0 if that slope is negative: the slope
    between the last two points would be mostly noise."""
    sizes, values = zip(*table, strict=True)
    half = max(0, bisect_right(sizes, sizes[-1] / 2) - 1)
    more = sizes[-1] - sizes[half]
    slope = (values[-1] - values[half]) / more if more else 0.0
    return np.interp(x, sizes, values) + max(0.0, slope) * np.maximum(x - sizes[-1], 0)


SAMPLING_KINDS = ("greedy", "sampled")  # steps of the two kinds differ in cost


def classify_sampling(params: SamplingParams) -> str:
    """Return the sampling kind of these params: "greedy" or "sampled"."""
    return "greedy" if params.greedy else "sampled"


def select_costliest(params: list[SamplingParams]) -> SamplingParams:
    """Return the params whose distributions take the most time to compute, reduced to the options
    that distributions depend on."""
    costliest = max(
        params, key=lambda each: (not each.greedy, each.standard[1:] != DEFAULT_PARAMS.standard[1:])
    )
    return SamplingParams(**costliest.standard._asdict())


def is_valid_table(table: CostTable) -> bool:
    """Return whether a table is not empty, its sizes ascend, and its values are finite and 0 or
    more."""
    rising = all(a < b for (a, _), (b, _) in pairwise(table))
    return bool(table) and rising and all(isfinite(value) and value >= 0 for _, value in table)
