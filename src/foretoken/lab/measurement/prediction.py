"""What a gamma would gain, from a measurement: section 3.5 with what was measured for alpha^i.

Tokens come from how often guess i was kept (beyond the measured gamma: alpha more each time), time
from what the steps of the measured runs took; v(n) says how a pass grows from one gamma to another.
Under `speculative` and under `block` alike, whether guess i is kept does not depend on how many are
made behind it, so one measured gamma speaks for the others: what it gained on the clock is what is
predicted for it, and the formula gives the others in proportion.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import hypot, sqrt
from statistics import median

import numpy as np

from foretoken.lab.estimate import Estimate
from foretoken.lab.measurement.result import Measurement

LEAST = 1e-9  # seconds of a pass, whatever its interval


@dataclass(frozen=True, slots=True)
class Costs:
    """The numbers that a prediction follows from; seconds."""

    alpha: float
    kept: tuple[float, ...]  # P(guess i is kept | those before it were), i = 1, 2, ..
    offered: tuple[float, ...]  # share of steps in which the drafter goes so far
    guess: float
    passes: tuple[float, ...]  # over 1, 2, .. tokens; but for the first, beside drafts
    plain: float  # other work of a step without guesses
    loop: float  # of a step with len(kept) guesses

    @property
    def max_gamma(self) -> int:
        return len(self.passes) - 1

    def survival(self, gamma: int) -> list[float]:
        """s_0, .., s_gamma: P(the first i guesses are kept)."""
        beyond = [self.alpha] * (gamma - len(self.kept))
        return np.cumprod([1.0, *self.kept[:gamma], *beyond]).tolist()

    def round(self, gamma: int) -> float:
        """Seconds of a step."""
        last = self.offered[-1] if self.offered else 1.0
        shares = [*self.offered, *[last] * gamma][:gamma]
        least = [1.0, *shares, 0.0]  # P(so many guesses or more)
        score = sum((least[d] - least[d + 1]) * self.passes[d] for d in range(gamma + 1))
        other = self.plain + (self.loop - self.plain) * gamma / max(1, len(self.kept))
        return score + self.guess * sum(shares) + other

    def speedups(self, tokens: int) -> list[float]:
        """Plain over speculative seconds for a text of so many tokens, at gamma 0, 1, ..

        Near the end gamma is cut to what is still wanted less one, as in generation.
        """
        rounds = [self.round(g) for g in range(self.max_gamma + 1)]
        laws = [_gains(self.survival(g)) for g in range(self.max_gamma + 1)]
        found: list[float] = []
        for gamma in range(self.max_gamma + 1):
            cost = np.zeros(tokens + 1)
            for n in range(1, tokens + 1):
                g = min(gamma, n - 1)
                cost[n] = rounds[g] + laws[g] @ cost[n - g - 1 : n][::-1]
            found.append(tokens * rounds[0] / float(cost[tokens]))
        return found


@dataclass(frozen=True, slots=True)
class Prediction:
    """One gamma; low and high follow from the 95 % intervals of what it was made from."""

    gamma: int
    tokens_per_call: float  # of very many tokens
    speedup: Estimate


def predictions(found: Measurement) -> list[Prediction]:
    """For gamma 0, 1, .. as far as passes were measured; for the measured gamma what it gained."""
    costs = _costs(found)
    shares = _shares(found, costs)
    others = [(_shares(found, a), _shares(found, b)) for a, b in _others(found, costs)]
    return [
        Prediction(
            gamma,
            sum(costs.survival(gamma)),
            _scaled(found.speedup, share, [(a[gamma] - b[gamma]) / 2 for a, b in others]),
        )
        if gamma
        else Prediction(0, 1.0, Estimate(1.0, 1.0, 1.0))
        for gamma, share in enumerate(shares)
    ]


def formula(found: Measurement) -> float:
    """The speed-up that follows for the measured gamma from alpha and costs, clock aside."""
    return _costs(found).speedups(_length(found))[found.options.gamma]


def _shares(found: Measurement, costs: Costs) -> list[float]:
    """Of the measured gamma's speed-up, at gamma 0, 1, .."""
    speedups = costs.speedups(_length(found))
    return [one / speedups[found.options.gamma] for one in speedups]


def _scaled(clock: Estimate, share: float, halves: list[float]) -> Estimate:
    """What the clock said, times a share with half intervals that are independent."""
    value = clock.value * share
    error = clock.value * sqrt(sum(half * half for half in halves))
    below, above = (share * (end - clock.value) for end in (clock.low, clock.high))
    return Estimate(value, max(0.0, value - hypot(below, error)), value + hypot(above, error))


def _length(found: Measurement) -> int:
    return max(1, round(found.tokens))


def best(table: list[Prediction]) -> Prediction:
    """The fastest with guesses; the smallest gamma on ties."""
    return max(table[1:], key=lambda one: one.speedup.value)


def _gains(survival: list[float]) -> np.ndarray:
    """P(a step gives 1, 2, .. tokens)."""
    return -np.diff([*survival, 0.0])


def _rising(seconds: list[float]) -> list[float]:
    """A pass over more tokens never takes less: where the clock says so, the machine was busy."""
    return np.minimum.accumulate(seconds[::-1])[::-1].tolist()


def _passes(found: Measurement, alone: list[float]) -> tuple[float, ...]:
    """Of steps with 0, 1, .. guesses: as in the runs, which were made with one gamma; for others as
    passes grow that are timed alone, without the draft's work between them."""
    alone = _rising(alone)
    steps = [step for one in found.prompts for step in one.loop.steps if step.drafted]
    slower = [step.score_seconds / alone[step.drafted] for step in steps]
    beside = median(slower) if slower else 1.0
    return (found.plain_pass.median, *(beside * seconds for seconds in alone[1:]))


def _costs(found: Measurement) -> Costs:
    alpha = found.alpha.value
    return Costs(
        alpha=alpha,
        kept=tuple(p.kept / p.asked if p.asked else alpha for p in found.positions),
        offered=tuple(p.offered for p in found.positions),
        guess=found.draft_seconds.median if found.draft_seconds else 0.0,
        passes=_passes(found, [p.median for p in found.passes]),
        plain=found.plain_overhead.median,
        loop=found.loop_overhead.median,
    )


def _others(found: Measurement, costs: Costs) -> list[tuple[Costs, Costs]]:
    """Both ends of the interval of each number that is uncertain, the others left as they are."""

    def ends(make: Callable[[float], Costs], error: float) -> tuple[Costs, Costs]:
        return make(error), make(-error)

    def alpha(error: float) -> Costs:
        share = 1 + error / costs.alpha if costs.alpha else 1.0
        kept = tuple(min(1.0, max(0.0, rate * share)) for rate in costs.kept)
        return replace(costs, alpha=min(1.0, max(0.0, costs.alpha + error)), kept=kept)

    def guess(error: float) -> Costs:
        return replace(costs, guess=max(0.0, costs.guess + error))

    def one(error: float) -> Costs:
        return replace(costs, passes=(costs.passes[0] + error, *costs.passes[1:]))

    def grown(n: int) -> tuple[Costs, Costs]:
        def to(seconds: float) -> Costs:
            others = [p.median for p in found.passes]
            moved = _passes(found, [*others[:n], max(LEAST, seconds), *others[n + 1 :]])
            return replace(costs, passes=(costs.passes[0], *moved[1:]))

        own = found.passes[n]
        return to(own.median + own.error), to(own.median - own.error)

    spread = found.draft_seconds.error if found.draft_seconds else 0.0
    return [
        ends(alpha, found.alpha.error),
        ends(guess, spread),
        ends(one, found.plain_pass.error),
        *(grown(n) for n in range(1, len(found.passes))),
    ]
