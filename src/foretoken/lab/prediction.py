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

import numpy as np

from foretoken.lab.estimate import Estimate
from foretoken.lab.measurement import Measurement


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

    def speedup(self, gamma: int, tokens: int) -> float:
        """Plain over speculative seconds for a text of so many tokens.

        Near the end gamma is cut to what is still wanted less one, as in generation.
        """
        rounds = [self.round(g) for g in range(gamma + 1)]
        laws = [_gains(self.survival(g)) for g in range(gamma + 1)]
        cost = np.zeros(tokens + 1)
        for n in range(1, tokens + 1):
            g = min(gamma, n - 1)
            cost[n] = rounds[g] + laws[g] @ cost[n - g - 1 : n][::-1]
        return tokens * rounds[0] / float(cost[tokens])


@dataclass(frozen=True, slots=True)
class Prediction:
    """One gamma; low and high follow from the 95 % intervals of what it was made from."""

    gamma: int
    tokens_per_call: float  # of very many tokens
    speedup: Estimate


def predictions(found: Measurement) -> list[Prediction]:
    """For gamma 0, 1, .. as far as passes were measured; for the measured gamma what it gained."""
    costs = _costs(found)
    others = _others(found, costs)
    return [_predict(found, costs, others, gamma) for gamma in range(costs.max_gamma + 1)]


def formula(found: Measurement) -> float:
    """The speed-up that follows for the measured gamma from alpha and costs, clock aside."""
    return _costs(found).speedup(found.options.gamma, _length(found))


def best(table: list[Prediction]) -> Prediction:
    """The fastest with guesses; the smallest gamma on ties."""
    return max(table[1:], key=lambda one: one.speedup.value)


def _predict(
    found: Measurement, costs: Costs, others: list[tuple[Costs, Costs]], gamma: int
) -> Prediction:
    calls = sum(costs.survival(gamma))
    if not gamma:
        return Prediction(0, calls, Estimate(1.0, 1.0, 1.0))
    tokens = _length(found)

    def against_measured(costs: Costs) -> float:
        return costs.speedup(gamma, tokens) / costs.speedup(found.options.gamma, tokens)

    clock, share = found.speedup, against_measured(costs)
    halves = [(against_measured(a) - against_measured(b)) / 2 for a, b in others]
    error = sqrt(sum((clock.value * half) ** 2 for half in halves))
    low, high = (share * (end - clock.value) for end in (clock.low, clock.high))
    value = clock.value * share
    interval = Estimate(value, max(0.0, value - hypot(low, error)), value + hypot(high, error))
    return Prediction(gamma, calls, interval)


def _length(found: Measurement) -> int:
    return max(1, round(found.tokens))


def _gains(survival: list[float]) -> np.ndarray:
    """P(a step gives 1, 2, .. tokens)."""
    return -np.diff([*survival, 0.0])


def _rising(seconds: list[float]) -> tuple[float, ...]:
    """A pass over more tokens never takes less: where the clock says so, the machine was busy."""
    return tuple(np.minimum.accumulate(seconds[::-1])[::-1].tolist())


def _passes(found: Measurement, alone: list[float]) -> tuple[float, ...]:
    """Of steps with 0, 1, .. guesses, from what passes take alone: the draft's work, in between,
    makes them slower."""
    beside = [seconds * found.beside_drafts for seconds in _rising(alone)[1:]]
    return (found.plain_pass.median, *beside)


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

    def more(sign: float) -> Costs:
        return replace(
            costs, passes=_passes(found, [p.median + sign * p.error for p in found.passes])
        )

    spread = found.draft_seconds.error if found.draft_seconds else 0.0
    return [
        ends(alpha, found.alpha.error),
        ends(guess, spread),
        ends(one, found.plain_pass.error),
        ends(more, 1.0),
    ]
