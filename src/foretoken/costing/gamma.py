"""Policies for the number of draft tokens before each step (paper, sections 3.5 and 5: varying
gamma).

A policy is asked with the rows and sees their records; it never sees a clock. `Adaptive` weighs
frozen costs against how likely draft tokens are to be kept, learned from each row's own past, for
all rows of a pass together: the draft tokens, row by row, that gain most tokens in the seconds of
the step. A row's prediction, from its request or its own text, costs no draft and has a past of its
own: the better of the two is used. Rows that ask for `deterministic` know no other rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.costing.costs import Costs, behind
from foretoken.records import StepRecord
from foretoken.request import Row

MAX_GAMMA = 16
DEPTHS = np.arange(1, MAX_GAMMA + 1)
MEMORY = 256  # steps that a lone draft token looks back at
FADE, PLAIN_FADE = 0.94, 0.96  # of what was seen, with each step that guessed or did not
LEAST = 0.04  # share of the prior's weight that never fades
DEPTH_WEIGHT = 10.0  # of the place before, as a place's prior
AGAIN = 4  # steps for which an answer serves while nothing is guessed, so nothing is learned
EXPLORE = 0.01  # of the time may be lost on draft tokens that do not pay
STAY = 4.0  # steps for which a new size of the pass is expected to stay: they share its cost
SPAN = 256  # tokens of a text by which its length is rounded: costs grow with it
BACK = 0.5  # the same where the draft is mostly silent: there, and back with the next step
RECENT, SPELLED = 32, 4  # steps, and forced tokens that are taken for spelled alike beforehand


@dataclass(frozen=True, slots=True)
class Beside:
    """Content of a forward besides one position of each row that a policy is asked for."""

    rows: int = 0  # others that are advanced
    positions: int = 0  # theirs, those of their draft tokens and of prompts that are read
    depth: int = 0  # draft tokens of the one that has most
    read: int = 0  # positions of prompts alone, whose time passes with and without draft tokens


NOTHING = Beside()


class Gamma(Protocol):
    """Asked before each step; the rows' records say what happened so far."""

    @property
    def most(self) -> int:
        """Guesses that a row is asked for at most."""
        ...

    def ask(self, rows: list[Row], beside: Beside = NOTHING) -> list[int]:
        """Guesses for every row, 0 or more. The engine trims them near a row's end."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same number."""

    gamma: int

    @property
    def most(self) -> int:
        return self.gamma

    def ask(self, rows: list[Row], beside: Beside = NOTHING) -> list[int]:
        return [self.gamma] * len(rows)


@dataclass(frozen=True, slots=True, eq=False)
class FreeOnly:
    """None but those that the engine adds by itself, which a row's grammar forces."""

    @property
    def most(self) -> int:
        return MAX_GAMMA

    def ask(self, rows: list[Row], beside: Beside = NOTHING) -> list[int]:
        return [0] * len(rows)


@dataclass(slots=True)
class Adaptive:
    """The best numbers by frozen costs and the rows' own pasts; 0 where no draft token pays.

    At 0 it still guesses now and then, for at most a hundredth of the time, to notice text that
    becomes predictable again. Rows of several calls may share one: their draft tokens are then
    weighed together.
    """

    costs: Costs
    alone: Costs | None = None  # of one row, for deterministic rows
    drafts: bool = True  # whether there is a drafter
    priors: tuple[tuple[float, float], ...] = ()  # by grade, of a drafter that has `Grades`
    _pasts: list[tuple[Row, Pasts]] = field(default_factory=list[tuple[Row, "Pasts"]], init=False)
    _last: int = field(default=0, init=False)  # positions of the last pass that was asked for
    # by what they were asked for last
    _prices: tuple[Hashable, Prices] | None = field(default=None, init=False)
    _lone: tuple[int, Prices, Prices] | None = field(default=None, init=False)

    @property
    def most(self) -> int:
        return MAX_GAMMA

    def ask(self, rows: list[Row], beside: Beside = NOTHING) -> list[int]:
        if beside == NOTHING and self._learned_nothing(rows):
            return [min(row.records[-1].gamma, row.room - 1) for row in rows]
        self._observe(rows, beside)
        sources = [self._source(row, pasts) for row, pasts in self._pasts]
        gammas = self._allotted(rows, sources, beside)
        self._last = len(rows) + beside.positions + sum(gammas)
        return gammas

    def _observe(self, rows: list[Row], beside: Beside) -> None:
        """Follow the rows' steps since the last answer."""
        if beside == NOTHING and rows and all(row.records for row in rows):
            # a draft may have been silent: the pass was smaller than what was asked for
            self._last = sum(map(_before, rows)) + rows[0].records[-1].padding
        elif not any(row.records for row in rows):
            self._last = 0  # the pass before was over a prompt, or another call's
        pasts_of = {id(row): pasts for row, pasts in self._pasts}
        self._pasts = [(row, pasts_of.get(id(row)) or self._fresh(row)) for row in rows]
        for row, pasts in self._pasts:
            for past in (*pasts.drafted, pasts.predicted):
                if past is not None:
                    past.follow(row.records)

    def _allotted(self, rows: list[Row], sources: list[Past], beside: Beside) -> list[int]:
        """Return gamma of every row, whose draft tokens come from `sources`.

        Deterministic rows choose as if alone. Then those choose together whose draft tokens are
        predicted, and last those with a draft: each group beside what the earlier ones take.
        """
        gammas: dict[int, int] = {}  # by index
        for b, row in enumerate(rows):
            if row.request.params.deterministic:
                costs = self.alone or self.costs
                (gammas[b],) = self._gammas([(row, sources[b])], costs, NOTHING, _before(row))
        for predicted in (True, False):
            group = [
                b
                for b, past in enumerate(sources)
                if b not in gammas and past.predicted == predicted
            ]
            if not group:
                continue
            others = len(rows) - len(group)
            drafted = (gammas.get(b, 0) for b, past in enumerate(sources) if not past.predicted)
            taken = Beside(
                rows=beside.rows + others,
                positions=beside.positions + others + sum(gammas.values()),
                depth=max(beside.depth, *drafted, 0),
                read=beside.read,
            )
            pairs = [(rows[b], sources[b]) for b in group]
            last = 0 if beside.read else self._last  # of another size in any case
            gammas |= zip(group, self._gammas(pairs, self.costs, taken, last), strict=True)
        return [gammas[b] for b in range(len(rows))]

    def _learned_nothing(self, rows: list[Row]) -> bool:
        """Tell whether the last answer still serves: the same rows, none of which drafted."""
        same = len(rows) == len(self._pasts) and all(
            row is earlier for row, (earlier, _) in zip(rows, self._pasts, strict=True)
        )
        return same and all(
            row.predicted_output is None
            and not row.request.params.deterministic
            and len(row.records) % AGAIN > 0
            and not row.records[-1].drafted
            and row.grade == row.records[-1].grade
            for row in rows
        )

    def _fresh(self, row: Row) -> Pasts:
        expected = row.predicted_output
        priors = enumerate(self.priors or (self.costs.prior,))
        return Pasts(
            [Past(prior, grade) for grade, prior in priors],
            None if expected is None else Past(expected.prior, None),
        )

    def _source(self, row: Row, pasts: Pasts) -> Past:
        """Return the source of a row's draft tokens, and note it in the row: the draft, or its
        predicted output where that says something and the row alone would gain more by it."""
        drafted, predicted = pasts.drafted[row.grade], pasts.predicted
        row.trusts = predicted is not None and bool(row.predicted(1))
        if predicted is None or not row.trusts:
            return drafted
        if self.drafts:  # compare tokens a second, each with its best gamma
            most, (with_draft, without) = min(row.room - 1, MAX_GAMMA), self._prices_alone(row)
            row.trusts = rate(predicted, most, without) >= rate(drafted, most, with_draft)
        return predicted if row.trusts else drafted

    def _prices_alone(self, row: Row) -> tuple[Prices, Prices]:
        """Return prices of a row alone, for tokens of the draft and for those that cost none."""
        length = spans([row])
        if self._lone is None or self._lone[0] != length:
            costs = by_length(self.alone or self.costs, [row])
            self._lone = length, prices_of(costs, 1), prices_of(costs.undrafted, 1)
        return self._lone[1:]

    def _gammas(
        self, rows: list[tuple[Row, Past]], costs: Costs, beside: Beside, last: int
    ) -> list[int]:
        """Return gamma of these rows, all of one kind of source, behind a pass of `last` positions.
        A row that gets none tries a few now and then, to notice text that became predictable."""
        prices = self._priced(costs, [row for row, _ in rows], beside, rows[0][1].predicted)
        most = [min(row.room - 1, MAX_GAMMA) for row, _ in rows]
        if prices.rows == 1:
            gamma = [single(rows[0][1], most[0], prices, last)]
        else:
            gamma = allot([past for _, past in rows], most, prices, last)
        rows_asked = zip(gamma, most, rows, strict=True)
        return [g or _try(row.records, n, prices) for g, n, (row, _) in rows_asked]

    def _priced(self, costs: Costs, rows: list[Row], beside: Beside, predicted: bool) -> Prices:
        """Prices by the length of the rows' texts, which stay the same for many steps: to find them
        by all numbers of the costs takes longer than a choice."""
        key = costs is self.alone, spans(rows), len(rows), beside, predicted
        if self._prices is None or self._prices[0] != key:
            costs = by_length(costs, rows, beside.rows)
            costs = costs.undrafted if predicted else costs
            self._prices = key, prices_of(costs, len(rows), beside)
        return self._prices[1]


class Past:
    """Acceptance that a row's steps have shown, older ones less and less.

    From beta = sum min(p, q) at each draft token judged, which is steadier than whether it was
    kept; draft tokens behind a rejection were not judged and do not count. `prior`: a number of
    draft tokens to begin with, and their mean beta. `grade`: only steps in which the drafter had
    this one; None: those with the request's own prediction.
    """

    __slots__ = (
        "steps",
        "grade",
        "_hits",
        "_seen",
        "_asked",
        "_drafted",
        "_prior",
        "_worth",
        "_least",
    )

    def __init__(self, prior: tuple[float, float], grade: int | None = 0) -> None:
        self.steps, self.grade = 0, grade
        self._hits: list[float] = []  # by place in the draft
        self._seen: list[float] = []
        self._asked = self._drafted = 0.0  # steps that asked for draft tokens, and got some
        self._worth, self._prior = prior
        self._least = LEAST * self._worth

    def see(self, step: StepRecord) -> None:
        """Another step of the row."""
        self.steps += 1
        if self.grade != (None if step.predicted else step.grade):
            return
        fade = FADE if step.drafted else PLAIN_FADE
        self._hits = [hit * fade for hit in self._hits]
        self._seen = [count * fade for count in self._seen]
        self._worth = max(self._worth * fade, self._least)
        self._asked = self._asked * fade + (step.gamma > 0)
        self._drafted = self._drafted * fade + (step.drafted > 0)
        for i, beta in enumerate(step.overlaps[:MAX_GAMMA]):
            if i == len(self._seen):
                self._hits.append(0.0)
                self._seen.append(0.0)
            self._hits[i] += beta
            self._seen[i] += 1.0

    def follow(self, records: list[StepRecord]) -> None:
        """The steps that are new of all these."""
        for step in records[self.steps :]:
            self.see(step)

    @property
    def predicted(self) -> bool:
        """True for draft tokens of the request's own prediction."""
        return self.grade is None

    @property
    def survival(self) -> list[float]:
        """P(the first i draft tokens are all kept), i = 1..MAX_GAMMA."""
        weight = sum(self._seen) + self._worth
        beta = (sum(self._hits) + self._worth * self._prior) / weight
        chance, survival = 1.0, list[float]()
        for hit, count in zip(self._hits, self._seen, strict=True):
            beta = (hit + DEPTH_WEIGHT * beta) / (count + DEPTH_WEIGHT)
            chance *= beta
            survival.append(chance)
        for _ in range(len(survival), MAX_GAMMA):
            chance *= beta
            survival.append(chance)
        return survival

    @property
    def answers(self) -> float:
        """P(the draft guesses at all); 1 until it has shown otherwise."""
        return (1 + self._drafted) / (1 + self._asked)


class Pasts(NamedTuple):
    """The pasts of a row's draft, by its grades, and of its prediction where it has one."""

    drafted: list[Past]
    predicted: Past | None


class Prices(NamedTuple):
    """Seconds of a step of `rows` rows, for the draft tokens that some of them make."""

    rows: int
    drafting: NDArray[np.float64]  # [depth of the draft - 1, draft tokens in all], what it adds
    passing: NDArray[np.float64]  # [draft tokens in all], the rest
    alike: list[float]  # where all rows make as many, by their number
    lone: list[float]  # of a row without others, by its draft tokens
    positions: int  # of a pass without these draft tokens
    change: float  # as `Costs.change`

    def after(self, last: int, answers: float) -> NDArray[np.float64]:
        """`passing` behind a pass over so many positions, 0: of a size that does not matter, with a
        draft that guesses so often."""
        if not last or not self.change:
            return self.passing
        changed = np.arange(len(self.passing)) != last - self.positions
        return self.passing + self.changing(answers) * changed

    def changing(self, answers: float) -> float:
        """Return the cost of another size for each of the steps that are expected to share it."""
        return self.change / (BACK + (STAY - BACK) * answers)


@lru_cache(256)
def prices_of(costs: Costs, rows: int, beside: Beside = NOTHING) -> Prices:
    """For the draft tokens of `rows` rows, in a pass that holds so much beside them.

    The time of reading prompts is left out: they have to be read once, and beside that time every
    draft token would seem cheap.
    """
    B, positions = rows + beside.rows, rows + beside.positions
    draft_tokens = np.arange(rows * MAX_GAMMA + 1)
    depths = np.maximum(DEPTHS, beside.depth)[:, None]
    before = costs.drafting(beside.depth, 0, B)
    drafting = np.asarray(costs.drafting(depths, draft_tokens, B) - before)
    read = costs.passing(positions, B) - costs.passing(positions - beside.read, B)
    passing = np.asarray(before - read + costs.passing(positions + draft_tokens, B + draft_tokens))
    alike = [costs.seconds(g, B) for g in range(MAX_GAMMA + 1)]
    lone = [float(passing[g] + (drafting[g - 1, g] if g else 0.0)) for g in range(MAX_GAMMA + 1)]
    return Prices(B, drafting, passing, alike, lone, positions, costs.change)


def by_length(costs: Costs, rows: list[Row], more: int = 0) -> Costs:
    """The costs behind texts as long as these rows', of so many rows and `more`."""
    return behind(costs, spans(rows) * SPAN, len(rows) + more)


def spans(rows: list[Row]) -> int:
    """Return how many spans long the rows' texts are."""
    return sum(len(row.tokens) for row in rows) // len(rows) // SPAN


def free(row: Row) -> int:
    """Return how many tokens of a row its grammar forces, which cost no draft; 0 where the target
    lately spelled most of such texts by other tokens."""
    if row.request.params.structured is None:
        return 0
    judged = [step for step in row.records[-RECENT:] if step.predicted]
    drafted, accepted = sum(step.drafted for step in judged), sum(step.accepted for step in judged)
    if SPELLED + accepted < (SPELLED + drafted) / 2:
        return 0
    return len(row.forced(min(MAX_GAMMA, row.room - 1)))


def _before(row: Row) -> int:
    """Positions of a row in its last pass; 0 where there was none."""
    return 1 + row.records[-1].drafted if row.records else 0


def rate(past: Past, most: int, prices: Prices) -> float:
    """Tokens a second of a row alone, with its best number of draft tokens."""
    answers, tokens, fastest = past.answers, 1.0, 1 / prices.alike[0]
    for chance, seconds in zip(past.survival[:most], prices.alike[1:], strict=False):
        tokens += answers * chance
        fastest = max(fastest, tokens / seconds)
    return fastest


def allot(pasts: list[Past], most: list[int], prices: Prices, last: int = 0) -> list[int]:
    """Return gamma of every row, at most `most[b]`, with which a pass gains most tokens a second
    after one over `last` positions.

    Maximized is, over the depth d of the draft and the n likeliest draft tokens within it,

        (B + s_1 + .. + s_n) / (T_0 + a (T_n - T_0 + D_{d,n}))

    B rows gain a token each; s_i is the chance that draft token i is accepted, so they are taken
    in that order; T_n is the time of a pass with n draft tokens, D_{d,n} that of making them, and a
    the share of steps in which the draft answers: where it stays silent, a step gains and costs
    what plain decoding does.
    """
    answers = np.array([past.answers for past in pasts])
    survivals = answers[:, None] * np.array([past.survival for past in pasts])  # [rows, MAX_GAMMA]
    possible = np.array(most)[:, None] >= DEPTHS
    chances, (row, place) = survivals[possible], possible.nonzero()
    order = (-chances).argsort(kind="stable")
    if not len(order):
        return [0] * len(pasts)
    row, within = row[order], place[order] < DEPTHS[:, None]  # [depth of the draft, guess]
    tokens = prices.rows + (within * chances[order]).cumsum(1)  # B + s_1 + .. + s_n
    draft_tokens = within.cumsum(1)
    # the share of the steps
    answered = (within * answers[row]).cumsum(1) / np.maximum(draft_tokens, 1)
    drafting = prices.drafting[DEPTHS[:, None] - 1, draft_tokens]
    passing = prices.after(last, float(answers.max()))
    more = passing[draft_tokens] - passing[0] + drafting
    rates = tokens / (passing[0] + answered * more)  # [depth, n - 1]
    depth, end = divmod(int(rates.argmax()), rates.shape[1])
    if rates[depth, end] <= prices.rows / passing[0]:
        return [0] * len(pasts)
    chosen = row[: end + 1][within[depth, : end + 1]]
    return [int(g) for g in np.bincount(chosen, minlength=len(pasts))]


def single(past: Past, most: int, prices: Prices, last: int = 0) -> int:
    """Do as `allot` for a row alone in its forward: without arrays, in a tenth of the time."""
    answers, survival = past.answers, past.survival[:most]
    change = prices.changing(answers) if last else 0.0
    plain = prices.lone[0] + change * (prices.positions != last)
    best, fastest, tokens = 0, 1 / plain, 1.0
    for g, chance in enumerate(survival, 1):
        tokens += answers * chance
        more = prices.lone[g] + change * (prices.positions + g != last) - plain
        if tokens / (plain + answers * more) > fastest:
            best, fastest = g, tokens / (plain + answers * more)
    return best


def _try(records: list[StepRecord], most: int, prices: Prices) -> int:
    """Guesses where plain decoding seems best, if little was lost on such lately; else 0."""
    if most < 1:
        return 0
    # a lone draft token changes the size of the pass twice
    seconds = [each + 2 * prices.change * (g > 0) for g, each in enumerate(prices.alike)]
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
