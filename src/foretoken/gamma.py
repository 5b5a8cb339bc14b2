"""How many guesses to make before each step (paper, sections 3.5 and 5: varying gamma).

A policy is asked with the rows and sees their records; it never sees a clock. `Adaptive` weighs
frozen costs against how likely guesses are to be kept, learned from the row's own past: for every
row the argmax of (1 + s_1 + .. + s_g) / T(g), s_i the chance that i guesses are all kept and T(g)
the seconds of a step. Only the number of rows that share the pass is taken from its mates.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from foretoken.costs import Costs
from foretoken.request import Row, StepRecord

MAX_GAMMA = 16
MEMORY = 256  # steps looked back at: what a step costs does not grow with the text
FADE, PLAIN_FADE = 0.94, 0.96  # of what was seen, with each step that guessed or did not
DEPTH_WEIGHT = 10.0  # a place in the draft is like the one before it until it has shown otherwise
EXPLORE = 0.01  # of the time may be lost on guesses that do not pay


class Gamma(Protocol):
    """Asked before each step; what rows have been through stands in their records."""

    def ask(self, rows: list[Row]) -> list[int]:
        """Guesses for every row, 0 or more. The engine trims them near a row's end."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number."""

    gamma: int

    def ask(self, rows: list[Row]) -> list[int]:
        return [self.gamma] * len(rows)


@dataclass(slots=True)
class Adaptive:
    """The best number by frozen costs and the row's own past; 0 where no guess pays.

    Where it has come to 0 it still guesses now and then, for at most a hundredth of the time, so
    that text which becomes predictable again is found.
    """

    costs: Costs
    _seconds: dict[int, list[float]] = field(default_factory=dict[int, list[float]], init=False)

    def ask(self, rows: list[Row]) -> list[int]:
        B = len(rows)
        if B not in self._seconds:
            self._seconds[B] = [self.costs.seconds(g, B) for g in range(MAX_GAMMA + 1)]
        known = self._seconds[B], self.costs.prior
        return [best(row.records, row.room - 1, *known) for row in rows]


def best(
    records: list[StepRecord], most: int, seconds: list[float], prior: tuple[float, float]
) -> int:
    """The gamma in 0..most for the next step of a row; seconds[g]: a step with g guesses."""
    past = records[-MEMORY:][::-1]  # latest first
    survival, spoken = expected(past, prior)
    gamma, rate, kept = 0, 1 / seconds[0], 0.0
    for g in range(1, min(most, len(seconds) - 1) + 1):
        kept += survival[g - 1]
        # a draft that stays silent gains nothing and costs what plain decoding does
        found = (1 + spoken * kept) / (seconds[0] + spoken * (seconds[g] - seconds[0]))
        if found > rate:
            gamma, rate = g, found
    return gamma or _try(past, most, seconds)


def expected(past: list[StepRecord], prior: tuple[float, float]) -> tuple[list[float], float]:
    """P(the first i guesses are all kept), i = 1..MAX_GAMMA, and P(the draft guesses at all).

    From beta = sum min(p, q) at each guess judged, which is steadier than whether it was kept; what
    lies behind a rejection was not judged and does not count. `past`: latest first; `prior`: what
    so many guesses before it would have shown.
    """
    hits, seen = [0.0] * MAX_GAMMA, [0.0] * MAX_GAMMA
    weight, asked, spoken = 1.0, 1.0, 1.0
    for step in past:
        for i, beta in enumerate(step.overlaps[:MAX_GAMMA]):
            hits[i] += weight * beta
            seen[i] += weight
        if step.gamma:
            asked += weight
            spoken += weight * (step.drafted > 0)
        weight *= FADE if step.drafted else PLAIN_FADE
        if weight < 0.04:
            break
    first = prior[0] * weight  # the prior is older than all that was seen
    beta = (sum(hits) + first * prior[1]) / (sum(seen) + first)
    survival: list[float] = []
    for hit, count in zip(hits, seen, strict=True):
        beta = (hit + DEPTH_WEIGHT * beta) / (count + DEPTH_WEIGHT)
        survival.append(beta * survival[-1] if survival else beta)
    return survival, spoken / asked


def _try(past: list[StepRecord], most: int, seconds: list[float]) -> int:
    """Where plain decoding seems best: a guess all the same, if little was lost on such lately."""
    if most < 1:
        return 0
    plain = seconds[0]
    # as many as show most for the time they take, were half of them kept
    gamma = max(range(1, len(seconds)), key=lambda g: (1 - 0.5**g) / max(seconds[g] - plain, 1e-9))
    gamma = min(gamma, most)
    time = lost = 0.0
    for step in past:
        took = seconds[min(step.drafted, len(seconds) - 1)]
        time += took
        lost += took - plain * (1 + step.accepted)
    return gamma if max(0.0, lost) + seconds[gamma] - plain <= EXPLORE * time else 0
