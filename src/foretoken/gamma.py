"""How many guesses to make before each step (paper, sections 3.5 and 5: varying gamma).

A policy is asked with the rows and sees their records; it never sees a clock. `Adaptive` weighs
frozen costs against how likely guesses are to be kept, learned from the row's own past: for every
row the argmax of (1 + s_1 + .. + s_g) / T(g), s_i the chance that i guesses are all kept and T(g)
the seconds of a step. Only the number of rows that share the pass is taken from its mates, and
by rows that ask for `deterministic` not even that.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from foretoken.costs import Costs
from foretoken.request import Row, StepRecord

MAX_GAMMA = 16
MEMORY = 256  # steps that a lone guess looks back at
FADE, PLAIN_FADE = 0.94, 0.96  # of what was seen, with each step that guessed or did not
LEAST = 0.04  # share of the prior's weight that never fades
DEPTH_WEIGHT = 10.0  # of the place before, as a place's prior
EXPLORE = 0.01  # of the time may be lost on guesses that do not pay


class Gamma(Protocol):
    """Asked before each step; the rows' records say what happened so far."""

    def ask(self, rows: list[Row], B: int) -> list[int]:
        """Guesses for every row, 0 or more, in a pass of B rows, of which these are some. The
        engine trims them near a row's end."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number."""

    gamma: int

    def ask(self, rows: list[Row], B: int) -> list[int]:
        return [self.gamma] * len(rows)


@dataclass(slots=True)
class Adaptive:
    """The best number by frozen costs and the row's own past; 0 where no guess pays.

    At 0 it still guesses now and then, for at most a hundredth of the time, to notice text that
    becomes predictable again.
    """

    costs: Costs
    alone: Costs | None = None  # of one row, for deterministic rows, which know no mates
    _seconds: dict[int, list[float]] = field(default_factory=dict[int, list[float]], init=False)
    _pasts: list[tuple[Row, Past]] = field(default_factory=list[tuple[Row, "Past"]], init=False)

    def ask(self, rows: list[Row], B: int) -> list[int]:
        if B not in self._seconds:
            self._seconds[B] = _table(self.costs, B)
        known = {id(row): past for row, past in self._pasts}
        self._pasts = [(row, known.get(id(row)) or Past(self.costs.prior)) for row in rows]
        return [self._best(row, past, self._costs_of(row, B)) for row, past in self._pasts]

    def _costs_of(self, row: Row, B: int) -> list[float]:
        if not row.request.params.deterministic:
            return self._seconds[B]
        if 0 not in self._seconds:
            self._seconds[0] = _table(self.alone or self.costs, 1)
        return self._seconds[0]

    def _best(self, row: Row, past: Past, seconds: list[float]) -> int:
        for step in row.records[past.steps :]:
            past.see(step)
        most = row.room - 1
        return best(past, most, seconds) or _try(row.records, most, seconds)


class Past:
    """What a row's steps have shown of its draft, older ones less and less.

    From beta = sum min(p, q) at each guess judged, which is steadier than whether it was kept;
    guesses behind a rejection were not judged and do not count. `prior`: a number of guesses to
    begin with, and their mean beta.
    """

    __slots__ = ("steps", "_hits", "_seen", "_asked", "_guessed", "_prior", "_worth", "_least")

    def __init__(self, prior: tuple[float, float]) -> None:
        self.steps = 0
        self._hits: list[float] = []  # by place in the draft
        self._seen: list[float] = []
        self._asked = self._guessed = 0.0  # steps that asked for guesses, and got some
        self._worth, self._prior = prior
        self._least = LEAST * self._worth

    def see(self, step: StepRecord) -> None:
        """Another step of the row."""
        fade = FADE if step.drafted else PLAIN_FADE
        self._hits = [hit * fade for hit in self._hits]
        self._seen = [count * fade for count in self._seen]
        self._worth = max(self._worth * fade, self._least)
        self._asked = self._asked * fade + (step.gamma > 0)
        self._guessed = self._guessed * fade + (step.drafted > 0)
        for i, beta in enumerate(step.overlaps[:MAX_GAMMA]):
            if i == len(self._seen):
                self._hits.append(0.0)
                self._seen.append(0.0)
            self._hits[i] += beta
            self._seen[i] += 1.0
        self.steps += 1

    @property
    def survival(self) -> list[float]:
        """P(the first i guesses are all kept), i = 1..MAX_GAMMA."""
        weight = sum(self._seen) + self._worth
        beta = (sum(self._hits) + self._worth * self._prior) / weight
        kept, survival = 1.0, list[float]()
        for hit, count in zip(self._hits, self._seen, strict=True):
            beta = (hit + DEPTH_WEIGHT * beta) / (count + DEPTH_WEIGHT)
            kept *= beta
            survival.append(kept)
        for _ in range(len(survival), MAX_GAMMA):
            kept *= beta
            survival.append(kept)
        return survival

    @property
    def answers(self) -> float:
        """P(the draft guesses at all); 1 until it has shown otherwise."""
        return (1 + self._guessed) / (1 + self._asked)


def _table(costs: Costs, B: int) -> list[float]:
    """Seconds of a step by gamma."""
    return [costs.seconds(g, B) for g in range(MAX_GAMMA + 1)]


def best(past: Past, most: int, seconds: list[float]) -> int:
    """The gamma in 0..most that gains most; seconds[g]: a step with g guesses."""
    survival, answers = past.survival, past.answers
    gamma, rate, kept = 0, 1 / seconds[0], 0.0
    for g in range(1, min(most, len(seconds) - 1) + 1):
        kept += survival[g - 1]
        # a draft that stays silent gains nothing and costs what plain decoding does
        tokens = 1 + answers * kept
        per_second = tokens / (seconds[0] + answers * (seconds[g] - seconds[0]))
        if per_second > rate:
            gamma, rate = g, per_second
    return gamma


def _try(records: list[StepRecord], most: int, seconds: list[float]) -> int:
    """Guesses where plain decoding seems best, if little was lost on such lately; else 0."""
    if most < 1:
        return 0
    plain = seconds[0]
    # as many as show most for the time they take, were half of them kept
    gamma = max(range(1, len(seconds)), key=lambda g: (1 - 0.5**g) / max(seconds[g] - plain, 1e-9))
    gamma = min(gamma, most)
    time = lost = 0.0
    for step in records[-MEMORY:]:
        took = seconds[min(step.drafted, len(seconds) - 1)]
        time += took
        lost += took - plain * (1 + step.accepted)
    return gamma if max(0.0, lost) + seconds[gamma] - plain <= EXPLORE * time else 0
