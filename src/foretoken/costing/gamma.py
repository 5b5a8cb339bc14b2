"""Policies for the number of draft tokens before each step (paper, sections 3.5 and 5: varying
gamma).

A policy is asked with the rows and sees their records; it never sees a clock. `AdaptiveGamma`
weighs frozen costs against how likely draft tokens are to be kept, learned from each row's own
past, for all rows of a pass together: the draft tokens, row by row, that gain most tokens in the
seconds of the step. A row's prediction, from its request or its own text, costs no draft and has a
past of its own: the better of the two is used. Rows that ask for `deterministic` know no other
rows.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.costing.costs import Costs, costs_at_context
from foretoken.records import StepRecord
from foretoken.request import SequenceState

MAX_GAMMA = 16
DRAFT_DEPTHS = np.arange(1, MAX_GAMMA + 1)
EXPLORATION_WINDOW_STEPS = 256  # steps that a lone draft token looks back at
DRAFT_STEP_DECAY, PLAIN_STEP_DECAY = (
    0.94,
    0.96,
)  # of what was seen, with each step that guessed or did not
MIN_PRIOR_WEIGHT = 0.04  # share of the prior's weight that never fades
DEPTH_PRIOR_WEIGHT = 10.0  # of the place before, as a place's prior
REUSE_DECISION_STEPS = (
    4  # steps for which an answer serves while nothing is guessed, so nothing is learned
)
MAX_EXPLORATION_SHARE = 0.01  # of the time may be lost on draft tokens that do not pay
SIZE_CHANGE_STEPS = (
    4.0  # steps for which a new size of the pass is expected to stay: they share its cost
)
CONTEXT_BUCKET_TOKENS = 256  # tokens of a text by which its length is rounded: costs grow with it
SILENT_SIZE_CHANGE_STEPS = (
    0.5  # the same where the draft is mostly silent: there, and back with the next step
)
FORCED_WINDOW_STEPS, FORCED_PRIOR_TOKENS = (
    32,
    4,
)  # steps, and forced tokens that are taken for spelled alike beforehand


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Content of a forward besides one position of each row that a policy is asked for."""

    num_seqs: int = 0  # others that are advanced
    positions: int = 0  # theirs, those of their draft tokens and of prompts that are read
    depth: int = 0  # draft tokens of the one that has most
    prefill_positions: int = (
        0  # positions of prompts alone, whose time passes with and without draft tokens
    )


NO_OTHER_WORK = OtherWork()


class GammaPolicy(Protocol):
    """Asked before each step; the rows' records say what happened so far."""

    @property
    def max_gamma(self) -> int:
        """Guesses that a row is asked for at most."""
        ...

    def choose_gammas(
        self, seqs: list[SequenceState], other_work: OtherWork = NO_OTHER_WORK
    ) -> list[int]:
        """Guesses for every row, 0 or more. The engine trims them near a row's end."""
        ...


@dataclass(frozen=True, slots=True)
class FixedGamma:
    """Always the same number."""

    gamma: int

    @property
    def max_gamma(self) -> int:
        return self.gamma

    def choose_gammas(
        self, seqs: list[SequenceState], other_work: OtherWork = NO_OTHER_WORK
    ) -> list[int]:
        return [self.gamma] * len(seqs)


@dataclass(frozen=True, slots=True, eq=False)
class ForcedTokensOnly:
    """None but those that the engine adds by itself, which a row's grammar forces."""

    @property
    def max_gamma(self) -> int:
        return MAX_GAMMA

    def choose_gammas(
        self, seqs: list[SequenceState], other_work: OtherWork = NO_OTHER_WORK
    ) -> list[int]:
        return [0] * len(seqs)


@dataclass(slots=True)
class AdaptiveGamma:
    """The best numbers by frozen costs and the rows' own pasts; 0 where no draft token pays.

    At 0 it still guesses now and then, for at most a hundredth of the time, to notice text that
    becomes predictable again. Rows of several calls may share one: their draft tokens are then
    weighed together.
    """

    costs: Costs
    single_costs: Costs | None = None  # of one row, for deterministic rows
    drafts: bool = True  # whether there is a drafter
    priors: tuple[tuple[float, float], ...] = ()  # by grade, of a drafter that has `Grades`
    _histories: list[tuple[SequenceState, AcceptanceHistory]] = field(
        default_factory=list[tuple[SequenceState, "AcceptanceHistory"]], init=False
    )
    _last_size: int = field(default=0, init=False)  # positions of the last pass that was asked for
    # by what they were asked for last
    _table: tuple[Hashable, StepCostTable] | None = field(default=None, init=False)
    _single_seq_tables: tuple[int, StepCostTable, StepCostTable] | None = field(
        default=None, init=False
    )

    @property
    def max_gamma(self) -> int:
        return MAX_GAMMA

    def choose_gammas(
        self, seqs: list[SequenceState], other_work: OtherWork = NO_OTHER_WORK
    ) -> list[int]:
        if other_work == NO_OTHER_WORK and self._can_reuse(seqs):
            return [min(seq.records[-1].gamma, seq.num_remaining - 1) for seq in seqs]
        self._observe(seqs, other_work)
        sources = [self._pick_source(seq, pasts) for seq, pasts in self._histories]
        gammas = self._choose_by_source(seqs, sources, other_work)
        self._last_size = len(seqs) + other_work.positions + sum(gammas)
        return gammas

    def _observe(self, seqs: list[SequenceState], other_work: OtherWork) -> None:
        """Follow the rows' steps since the last answer."""
        if other_work == NO_OTHER_WORK and seqs and all(seq.records for seq in seqs):
            # a draft may have been silent: the pass was smaller than what was asked for
            self._last_size = sum(map(_last_positions, seqs)) + seqs[0].records[-1].padding
        elif not any(seq.records for seq in seqs):
            self._last_size = 0  # the pass before was over a prompt, or another call's
        pasts_of = {id(seq): pasts for seq, pasts in self._histories}
        self._histories = [(seq, pasts_of.get(id(seq)) or self._new_history(seq)) for seq in seqs]
        for seq, pasts in self._histories:
            for past in (*pasts.drafted, pasts.predicted):
                if past is not None:
                    past.add_new_steps(seq.records)

    def _choose_by_source(
        self, seqs: list[SequenceState], sources: list[AcceptanceEstimate], other_work: OtherWork
    ) -> list[int]:
        """Return gamma of every row, whose draft tokens come from `sources`.

        Deterministic rows choose as if alone. Then those choose together whose draft tokens are
        predicted, and last those with a draft: each group beside what the earlier ones take.
        """
        gammas: dict[int, int] = {}  # by index
        for b, seq in enumerate(seqs):
            if seq.request.params.deterministic:
                costs = self.single_costs or self.costs
                (gammas[b],) = self._choose_for_source(
                    [(seq, sources[b])], costs, NO_OTHER_WORK, _last_positions(seq)
                )
        for predicted in (True, False):
            group = [
                b
                for b, past in enumerate(sources)
                if b not in gammas and past.predicted == predicted
            ]
            if not group:
                continue
            others = len(seqs) - len(group)
            drafted = (gammas.get(b, 0) for b, past in enumerate(sources) if not past.predicted)
            taken = OtherWork(
                num_seqs=other_work.num_seqs + others,
                positions=other_work.positions + others + sum(gammas.values()),
                depth=max(other_work.depth, *drafted, 0),
                prefill_positions=other_work.prefill_positions,
            )
            pairs = [(seqs[b], sources[b]) for b in group]
            last = (
                0 if other_work.prefill_positions else self._last_size
            )  # of another size in any case
            gammas |= zip(
                group, self._choose_for_source(pairs, self.costs, taken, last), strict=True
            )
        return [gammas[b] for b in range(len(seqs))]

    def _can_reuse(self, seqs: list[SequenceState]) -> bool:
        """Tell whether the last answer still serves: the same rows, none of which drafted."""
        same = len(seqs) == len(self._histories) and all(
            seq is earlier for seq, (earlier, _) in zip(seqs, self._histories, strict=True)
        )
        return same and all(
            seq.output_predictor is None
            and not seq.request.params.deterministic
            and len(seq.records) % REUSE_DECISION_STEPS > 0
            and not seq.records[-1].drafted
            and seq.grade == seq.records[-1].grade
            for seq in seqs
        )

    def _new_history(self, seq: SequenceState) -> AcceptanceHistory:
        expected = seq.output_predictor
        priors = enumerate(self.priors or (self.costs.prior,))
        return AcceptanceHistory(
            [AcceptanceEstimate(prior, grade) for grade, prior in priors],
            None if expected is None else AcceptanceEstimate(expected.prior, None),
        )

    def _pick_source(self, seq: SequenceState, history: AcceptanceHistory) -> AcceptanceEstimate:
        """Return the source of a row's draft tokens, and note it in the row: the draft, or its
        predicted output where that says something and the row alone would gain more by it."""
        drafted, predicted = history.drafted[seq.grade], history.predicted
        seq.uses_prediction = predicted is not None and bool(seq.predict_tokens(1))
        if predicted is None or not seq.uses_prediction:
            return drafted
        if self.drafts:  # compare tokens a second, each with its best gamma
            max_gamma, (with_draft, without) = (
                min(seq.num_remaining - 1, MAX_GAMMA),
                self._single_tables(seq),
            )
            seq.uses_prediction = best_token_rate(predicted, max_gamma, without) >= best_token_rate(
                drafted, max_gamma, with_draft
            )
        return predicted if seq.uses_prediction else drafted

    def _single_tables(self, seq: SequenceState) -> tuple[StepCostTable, StepCostTable]:
        """Return prices of a row alone, for tokens of the draft and for those that cost none."""
        length = count_context_buckets([seq])
        if self._single_seq_tables is None or self._single_seq_tables[0] != length:
            costs = costs_at_length(self.single_costs or self.costs, [seq])
            self._single_seq_tables = (
                length,
                make_cost_table(costs, 1),
                make_cost_table(costs.without_draft_seconds, 1),
            )
        return self._single_seq_tables[1:]

    def _choose_for_source(
        self,
        seqs: list[tuple[SequenceState, AcceptanceEstimate]],
        costs: Costs,
        other_work: OtherWork,
        last: int,
    ) -> list[int]:
        """Return gamma of these rows, all of one kind of source, behind a pass of `last` positions.
        A row that gets none tries a few now and then, to notice text that became predictable."""
        table = self._cost_table(costs, [seq for seq, _ in seqs], other_work, seqs[0][1].predicted)
        max_gammas = [min(seq.num_remaining - 1, MAX_GAMMA) for seq, _ in seqs]
        if table.num_seqs == 1:
            gamma = [choose_single_gamma(seqs[0][1], max_gammas[0], table, last)]
        else:
            gamma = allot_gammas([past for _, past in seqs], max_gammas, table, last)
        rows_asked = zip(gamma, max_gammas, seqs, strict=True)
        return [g or _choose_exploration(seq.records, n, table) for g, n, (seq, _) in rows_asked]

    def _cost_table(
        self, costs: Costs, seqs: list[SequenceState], other_work: OtherWork, predicted: bool
    ) -> StepCostTable:
        """Prices by the length of the rows' texts, which stay the same for many steps: to find them
        by all numbers of the costs takes longer than a choice."""
        key = (
            costs is self.single_costs,
            count_context_buckets(seqs),
            len(seqs),
            other_work,
            predicted,
        )
        if self._table is None or self._table[0] != key:
            costs = costs_at_length(costs, seqs, other_work.num_seqs)
            costs = costs.without_draft_seconds if predicted else costs
            self._table = key, make_cost_table(costs, len(seqs), other_work)
        return self._table[1]


class AcceptanceEstimate:
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
        self._least = MIN_PRIOR_WEIGHT * self._worth

    def add_step(self, step: StepRecord) -> None:
        """Another step of the row."""
        self.steps += 1
        if self.grade != (None if step.predicted else step.grade):
            return
        fade = DRAFT_STEP_DECAY if step.drafted else PLAIN_STEP_DECAY
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

    def add_new_steps(self, records: list[StepRecord]) -> None:
        """The steps that are new of all these."""
        for step in records[self.steps :]:
            self.add_step(step)

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
            beta = (hit + DEPTH_PRIOR_WEIGHT * beta) / (count + DEPTH_PRIOR_WEIGHT)
            chance *= beta
            survival.append(chance)
        for _ in range(len(survival), MAX_GAMMA):
            chance *= beta
            survival.append(chance)
        return survival

    @property
    def answer_rate(self) -> float:
        """P(the draft guesses at all); 1 until it has shown otherwise."""
        return (1 + self._drafted) / (1 + self._asked)


class AcceptanceHistory(NamedTuple):
    """The pasts of a row's draft, by its grades, and of its prediction where it has one."""

    drafted: list[AcceptanceEstimate]
    predicted: AcceptanceEstimate | None


class StepCostTable(NamedTuple):
    """Seconds of a step of `num_seqs` rows, for the draft tokens that some of them make."""

    num_seqs: int
    draft_seconds: NDArray[
        np.float64
    ]  # [depth of the draft - 1, draft tokens in all], what it adds
    target_seconds: NDArray[np.float64]  # [draft tokens in all], the rest
    seconds_by_gamma: list[float]  # where all rows make as many, by their number
    single_seconds: list[float]  # of a row without others, by its draft tokens
    positions: int  # of a pass without these draft tokens
    change: float  # as `Costs.change`

    def target_seconds_after(self, last: int, answers: float) -> NDArray[np.float64]:
        """`passing` behind a pass over so many positions, 0: of a size that does not matter, with a
        draft that guesses so often."""
        if not last or not self.change:
            return self.target_seconds
        changed = np.arange(len(self.target_seconds)) != last - self.positions
        return self.target_seconds + self.share_of_size_change(answers) * changed

    def share_of_size_change(self, answers: float) -> float:
        """Return the cost of another size for each of the steps that are expected to share it."""
        return self.change / (
            SILENT_SIZE_CHANGE_STEPS + (SIZE_CHANGE_STEPS - SILENT_SIZE_CHANGE_STEPS) * answers
        )


@lru_cache(256)
def make_cost_table(
    costs: Costs, num_seqs: int, other_work: OtherWork = NO_OTHER_WORK
) -> StepCostTable:
    """For the draft tokens of `num_seqs` rows, in a pass that holds so much beside them.

    The time of reading prompts is left out: they have to be read once, and beside that time every
    draft token would seem cheap.
    """
    B, positions = num_seqs + other_work.num_seqs, num_seqs + other_work.positions
    draft_tokens = np.arange(num_seqs * MAX_GAMMA + 1)
    depths = np.maximum(DRAFT_DEPTHS, other_work.depth)[:, None]
    before = costs.draft_seconds(other_work.depth, 0, B)
    drafting = np.asarray(costs.draft_seconds(depths, draft_tokens, B) - before)
    read = costs.target_seconds(positions, B) - costs.target_seconds(
        positions - other_work.prefill_positions, B
    )
    passing = np.asarray(
        before - read + costs.target_seconds(positions + draft_tokens, B + draft_tokens)
    )
    alike = [costs.step_seconds(g, B) for g in range(MAX_GAMMA + 1)]
    lone = [float(passing[g] + (drafting[g - 1, g] if g else 0.0)) for g in range(MAX_GAMMA + 1)]
    return StepCostTable(B, drafting, passing, alike, lone, positions, costs.change)


def costs_at_length(costs: Costs, seqs: list[SequenceState], num_others: int = 0) -> Costs:
    """The costs behind texts as long as these rows', of so many rows and `more`."""
    return costs_at_context(
        costs, count_context_buckets(seqs) * CONTEXT_BUCKET_TOKENS, len(seqs) + num_others
    )


def count_context_buckets(seqs: list[SequenceState]) -> int:
    """Return how many spans long the rows' texts are."""
    return sum(len(seq.tokens) for seq in seqs) // len(seqs) // CONTEXT_BUCKET_TOKENS


def count_forced_tokens(seq: SequenceState) -> int:
    """Return how many tokens of a row its grammar forces, which cost no draft; 0 where the target
    lately spelled most of such texts by other tokens."""
    if seq.request.params.structured is None:
        return 0
    judged = [step for step in seq.records[-FORCED_WINDOW_STEPS:] if step.predicted]
    drafted, accepted = sum(step.drafted for step in judged), sum(step.accepted for step in judged)
    if FORCED_PRIOR_TOKENS + accepted < (FORCED_PRIOR_TOKENS + drafted) / 2:
        return 0
    return len(seq.find_forced_tokens(min(MAX_GAMMA, seq.num_remaining - 1)))


def _last_positions(seq: SequenceState) -> int:
    """Positions of a row in its last pass; 0 where there was none."""
    return 1 + seq.records[-1].drafted if seq.records else 0


def best_token_rate(estimate: AcceptanceEstimate, max_gamma: int, table: StepCostTable) -> float:
    """Tokens a second of a row alone, with its best number of draft tokens."""
    answers, tokens, fastest = estimate.answer_rate, 1.0, 1 / table.seconds_by_gamma[0]
    for chance, seconds in zip(
        estimate.survival[:max_gamma], table.seconds_by_gamma[1:], strict=False
    ):
        tokens += answers * chance
        fastest = max(fastest, tokens / seconds)
    return fastest


def allot_gammas(
    estimates: list[AcceptanceEstimate], max_gammas: list[int], table: StepCostTable, last: int = 0
) -> list[int]:
    """Return gamma of every row, at most `most[b]`, with which a pass gains most tokens a second
    after one over `last` positions.

    Maximized is, over the depth d of the draft and the n likeliest draft tokens within it,

        (B + s_1 + .. + s_n) / (T_0 + a (T_n - T_0 + D_{d,n}))

    B rows gain a token each; s_i is the chance that draft token i is accepted, so they are taken
    in that order; T_n is the time of a pass with n draft tokens, D_{d,n} that of making them, and a
    the share of steps in which the draft answers: where it stays silent, a step gains and costs
    what plain decoding does.
    """
    answers = np.array([past.answer_rate for past in estimates])
    survivals = answers[:, None] * np.array(
        [past.survival for past in estimates]
    )  # [rows, MAX_GAMMA]
    possible = np.array(max_gammas)[:, None] >= DRAFT_DEPTHS
    chances, (row, place) = survivals[possible], possible.nonzero()
    order = (-chances).argsort(kind="stable")
    if not len(order):
        return [0] * len(estimates)
    row, within = row[order], place[order] < DRAFT_DEPTHS[:, None]  # [depth of the draft, guess]
    tokens = table.num_seqs + (within * chances[order]).cumsum(1)  # B + s_1 + .. + s_n
    draft_tokens = within.cumsum(1)
    # the share of the steps
    answered = (within * answers[row]).cumsum(1) / np.maximum(draft_tokens, 1)
    drafting = table.draft_seconds[DRAFT_DEPTHS[:, None] - 1, draft_tokens]
    passing = table.target_seconds_after(last, float(answers.max()))
    more = passing[draft_tokens] - passing[0] + drafting
    rates = tokens / (passing[0] + answered * more)  # [depth, n - 1]
    depth, end = divmod(int(rates.argmax()), rates.shape[1])
    if rates[depth, end] <= table.num_seqs / passing[0]:
        return [0] * len(estimates)
    chosen = row[: end + 1][within[depth, : end + 1]]
    return [int(g) for g in np.bincount(chosen, minlength=len(estimates))]


def choose_single_gamma(
    estimate: AcceptanceEstimate, max_gamma: int, table: StepCostTable, last: int = 0
) -> int:
    """Do as `allot_gammas` for a row alone in its forward: without arrays, in a tenth of the
    time."""
    answers, survival = estimate.answer_rate, estimate.survival[:max_gamma]
    change = table.share_of_size_change(answers) if last else 0.0
    plain = table.single_seconds[0] + change * (table.positions != last)
    best, fastest, tokens = 0, 1 / plain, 1.0
    for g, chance in enumerate(survival, 1):
        tokens += answers * chance
        more = table.single_seconds[g] + change * (table.positions + g != last) - plain
        if tokens / (plain + answers * more) > fastest:
            best, fastest = g, tokens / (plain + answers * more)
    return best


def _choose_exploration(records: list[StepRecord], max_gamma: int, table: StepCostTable) -> int:
    """Guesses where plain decoding seems best, if little was lost on such lately; else 0."""
    if max_gamma < 1:
        return 0
    # a lone draft token changes the size of the pass twice
    seconds = [each + 2 * table.change * (g > 0) for g, each in enumerate(table.seconds_by_gamma)]
    plain = seconds[0]
    # as many as show most for the time they take, were half of them kept
    gamma = max(range(1, len(seconds)), key=lambda g: (1 - 0.5**g) / max(seconds[g] - plain, 1e-9))
    gamma = min(gamma, max_gamma)
    time = lost = 0.0
    for step in records[-EXPLORATION_WINDOW_STEPS:]:
        took = seconds[min(step.drafted, len(seconds) - 1)]
        time += took
        lost += took - plain * (1 + step.accepted)
    return gamma if max(0.0, lost) + seconds[gamma] - plain <= MAX_EXPLORATION_SHARE * time else 0
