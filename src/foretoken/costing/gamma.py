"""Policies that choose gamma for each sequence before each step (paper, sections 3.5 and 5: varying
gamma).

A policy depends on the sequences' step records, never on a clock. `AdaptiveGamma` takes frozen step
costs and estimates of each sequence's acceptance, and chooses, for all sequences of a forward pass
together, the draft tokens that give most new tokens per second. If a sequence has predicted output,
its draft tokens can come from the predicted output instead of the drafter: both sources have
acceptance estimates, and the better source is used. For a sequence with `deterministic` set, gamma
is chosen as if the sequence were alone in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.costing.costs import Costs, Numbers, costs_at_context
from foretoken.records import StepRecord
from foretoken.request import SequenceState

MAX_GAMMA = 16
DRAFT_DEPTHS = np.arange(1, MAX_GAMMA + 1)
EXPLORATION_WINDOW_STEPS = 256  # steps over which the time lost on exploration is counted
# factors by which the weights of observations shrink in each step with, and without, draft tokens
DRAFT_STEP_DECAY, PLAIN_STEP_DECAY = 0.94, 0.96
MIN_PRIOR_WEIGHT = 0.04  # share of the prior's weight that never decays
DEPTH_PRIOR_WEIGHT = 10.0  # weight of position i - 1's acceptance as the prior of position i
REUSE_DECISION_STEPS = 4  # without draft tokens, choose only in every 4th step
MAX_EXPLORATION_SHARE = 0.01  # share of the time that draft tokens may lose to try them
SIZE_CHANGE_STEPS = 4.0  # expected steps until the pass size changes again; they share the cost
CONTEXT_BUCKET_TOKENS = 256  # sequence lengths are rounded to multiples of this
SILENT_SIZE_CHANGE_STEPS = 0.5  # the same if the drafter rarely proposes: the size changes back
# last steps whose forced tokens are counted, and accepted forced tokens assumed at the start
FORCED_WINDOW_STEPS, FORCED_PRIOR_TOKENS = 32, 4


@dataclass(frozen=True, slots=True)
class OtherWork:
    """Work of a forward pass in addition to the sequences that a policy chooses gamma for."""

    num_seqs: int = 0  # other sequences that generate a token
    positions: int = 0  # of these sequences, of their draft tokens and of prompts in prefill
    depth: int = 0  # the largest gamma of these sequences
    prefill_positions: int = 0  # only of prompts in prefill, whose time does not depend on gamma
    width: int = 1  # the most positions of any of these sequences


NO_OTHER_WORK = OtherWork()

CountPositions = Callable[[int, int], int | None]  # `Model.count_padded_positions`


def count_no_padding(batch_size: int, width: int) -> int | None:
    """Return None, as models whose forward passes have no padding."""
    return None


class GammaPolicy(Protocol):
    """Chooses gamma before each step, from the sequences' records."""

    @property
    def max_gamma(self) -> int:
        """The largest gamma that this policy may choose."""
        ...

    def choose_gammas(
        self, seqs: list[SequenceState], other_work: OtherWork = NO_OTHER_WORK
    ) -> list[int]:
        """Return gamma of every sequence; the engine lowers gamma near a sequence's end."""
        ...


@dataclass(frozen=True, slots=True)
class FixedGamma:
    """A policy with the same gamma for all sequences and steps."""

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
    """A policy with gamma 0. The engine adds the draft tokens that a grammar forces."""

    @property
    def max_gamma(self) -> int:
        return MAX_GAMMA

    def choose_gammas(
        self, seqs: list[SequenceState], other_work: OtherWork = NO_OTHER_WORK
    ) -> list[int]:
        return [0] * len(seqs)


@dataclass(slots=True)
class AdaptiveGamma:
    """Chooses the gamma that generates fastest, by frozen costs and each sequence's acceptance; 0
    if draft tokens do not pay.

    If gamma is 0, the policy still tries draft tokens now and then, for at most a hundredth of the
    time, to notice when the output becomes predictable again. Sequences of several calls may share
    one policy, which then chooses for all of these sequences together.
    """

    costs: Costs
    single_costs: Costs | None = None  # for batch size 1, for deterministic sequences
    drafts: bool = True  # whether there is a drafter
    priors: tuple[tuple[float, float], ...] = ()  # by grade, for a drafter with `Grades`
    count_positions: CountPositions = count_no_padding  # of the target
    _histories: list[tuple[SequenceState, AcceptanceHistory]] = field(
        default_factory=list[tuple[SequenceState, "AcceptanceHistory"]], init=False
    )
    _last_size: int = field(default=0, init=False)  # positions of the last forward pass
    # cached cost tables, with the arguments that they were computed for
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
        sources = [self._pick_source(seq, history) for seq, history in self._histories]
        gammas = self._choose_by_source(seqs, sources, other_work)
        padded = self.count_positions(
            len(seqs) + other_work.num_seqs, max(1 + max(gammas, default=0), other_work.width)
        )
        self._last_size = padded or len(seqs) + other_work.positions + sum(gammas)
        return gammas

    def _observe(self, seqs: list[SequenceState], other_work: OtherWork) -> None:
        """Add the steps since the last choice to the sequences' histories."""
        if other_work == NO_OTHER_WORK and seqs and all(seq.records for seq in seqs):
            # a drafter may have proposed less than gamma: then the pass was smaller than planned
            self._last_size = sum(map(_last_positions, seqs)) + seqs[0].records[-1].padding
        elif not any(seq.records for seq in seqs):
            self._last_size = 0  # the last pass was a prefill, or another call's
        known = {id(seq): history for seq, history in self._histories}
        self._histories = [(seq, known.get(id(seq)) or self._make_history(seq)) for seq in seqs]
        for seq, history in self._histories:
            for estimate in (*history.drafted, history.predicted):
                if estimate is not None:
                    estimate.add_new_steps(seq.records)

    def _choose_by_source(
        self, seqs: list[SequenceState], sources: list[AcceptanceEstimate], other_work: OtherWork
    ) -> list[int]:
        """Return gamma of every sequence; `sources[b]` estimates the acceptance of sequence b's
        draft tokens.

        Gamma is chosen first for each deterministic sequence by itself, then for all sequences with
        predicted output together, and last for all sequences with the drafter together. Each of
        these groups counts the positions of earlier groups as other work.
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
                for b, source in enumerate(sources)
                if b not in gammas and source.predicted == predicted
            ]
            if not group:
                continue
            others = len(seqs) - len(group)
            drafted = (gammas.get(b, 0) for b, each in enumerate(sources) if not each.predicted)
            taken = OtherWork(
                num_seqs=other_work.num_seqs + others,
                positions=other_work.positions + others + sum(gammas.values()),
                depth=max(other_work.depth, *drafted, 0),
                prefill_positions=other_work.prefill_positions,
                width=max(other_work.width, 1 + max(gammas.values(), default=0)),
            )
            pairs = [(seqs[b], sources[b]) for b in group]
            # a pass with prefill has another size anyway
            last = 0 if other_work.prefill_positions else self._last_size
            gammas |= zip(
                group, self._choose_for_source(pairs, self.costs, taken, last), strict=True
            )
        return [gammas[b] for b in range(len(seqs))]

    def _can_reuse(self, seqs: list[SequenceState]) -> bool:
        """Return whether to repeat the last choice: if the sequences are the same, had no draft
        tokens in the last step, and are not due for a new choice (`REUSE_DECISION_STEPS`)."""
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

    def _make_history(self, seq: SequenceState) -> AcceptanceHistory:
        expected = seq.output_predictor
        priors = enumerate(self.priors or (self.costs.prior,))
        return AcceptanceHistory(
            [AcceptanceEstimate(prior, grade) for grade, prior in priors],
            None if expected is None else AcceptanceEstimate(expected.prior, None),
        )

    def _pick_source(self, seq: SequenceState, history: AcceptanceHistory) -> AcceptanceEstimate:
        """Choose the source of a sequence's draft tokens: the predicted output if it has a next
        token and is the faster source for the sequence alone, else the drafter. Set the sequence's
        `uses_prediction` and return the source's acceptance estimate."""
        drafted, predicted = history.drafted[seq.grade], history.predicted
        seq.uses_prediction = predicted is not None and bool(seq.predict_tokens(1))
        if predicted is None or not seq.uses_prediction:
            return drafted
        if self.drafts:  # compare tokens per second, with the best gamma of each source
            max_gamma, (with_draft, without) = (
                min(seq.num_remaining - 1, MAX_GAMMA),
                self._single_tables(seq),
            )
            seq.uses_prediction = find_best_token_rate(
                predicted, max_gamma, without
            ) >= find_best_token_rate(drafted, max_gamma, with_draft)
        return predicted if seq.uses_prediction else drafted

    def _single_tables(self, seq: SequenceState) -> tuple[StepCostTable, StepCostTable]:
        """Return two cost tables for batch size 1: with the drafter, and with draft tokens that
        take no time."""
        length = count_context_buckets([seq])
        if self._single_seq_tables is None or self._single_seq_tables[0] != length:
            costs = get_costs_at_length(self.single_costs or self.costs, [seq])
            self._single_seq_tables = (
                length,
                make_cost_table(costs, 1, count_positions=self.count_positions),
                make_cost_table(
                    costs.without_draft_seconds, 1, count_positions=self.count_positions
                ),
            )
        return self._single_seq_tables[1:]

    def _choose_for_source(
        self,
        seqs: list[tuple[SequenceState, AcceptanceEstimate]],
        costs: Costs,
        other_work: OtherWork,
        last: int,
    ) -> list[int]:
        """Return gamma of these sequences for the step after a pass over `last` positions. All
        sequences use the drafter, or all use predicted output. Now and then, a sequence whose best
        gamma is 0 tries a few draft tokens."""
        table = self._cost_table(costs, [seq for seq, _ in seqs], other_work, seqs[0][1].predicted)
        max_gammas = [min(seq.num_remaining - 1, MAX_GAMMA) for seq, _ in seqs]
        if table.num_seqs == 1:
            gamma = [choose_single_gamma(seqs[0][1], max_gammas[0], table, last)]
        else:
            gamma = allot_gammas([source for _, source in seqs], max_gammas, table, last)
        if self.count_positions(len(seqs), 1) is None:
            each = zip(gamma, max_gammas, seqs, strict=True)
            return [g or _choose_exploration(seq.records, n, table) for g, n, (seq, _) in each]
        if any(gamma):
            return gamma
        # a try of one sequence pads the pass for all, so all try at once
        longest = max((seq.records for seq, _ in seqs), key=len)
        tried = _choose_exploration(longest, max(max_gammas), table)
        return [min(tried, n) for n in max_gammas]

    def _cost_table(
        self, costs: Costs, seqs: list[SequenceState], other_work: OtherWork, predicted: bool
    ) -> StepCostTable:
        """Return the cost table for these sequences. The last table, which is valid for many steps,
        is cached here: a look-up in the cache of `make_cost_table` hashes all numbers of `costs`,
        which takes longer than the choice of gamma."""
        key = (
            costs is self.single_costs,
            count_context_buckets(seqs),
            len(seqs),
            other_work,
            predicted,
        )
        if self._table is None or self._table[0] != key:
            costs = get_costs_at_length(costs, seqs, other_work.num_seqs)
            costs = costs.without_draft_seconds if predicted else costs
            table = make_cost_table(costs, len(seqs), other_work, self.count_positions)
            self._table = key, table
        return self._table[1]


class AcceptanceEstimate:
    """The acceptance of a sequence's draft tokens, estimated from its steps; older steps count
    less.

    The estimate is a mean of beta = sum min(p, q) over verified draft tokens, because beta varies
    less than the share of accepted tokens; draft tokens after a rejection do not count. The
    estimate begins with `prior`: a number of draft tokens and their mean beta. Only steps in which
    the drafter had this `grade` count; if `grade` is None, only steps with predicted output.
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
        self._hits: list[float] = []  # sums of beta, by position in the draft
        self._seen: list[float] = []  # numbers of verified draft tokens, by position
        self._asked = self._drafted = 0.0  # steps with gamma > 0, and with draft tokens
        self._worth, self._prior = prior
        self._least = MIN_PRIOR_WEIGHT * self._worth

    def add_step(self, step: StepRecord) -> None:
        """Add the sequence's next step."""
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
        """Add the steps of `records` that were not added yet."""
        for step in records[self.steps :]:
            self.add_step(step)

    @property
    def predicted(self) -> bool:
        """True if this is the acceptance of predicted output, not of a drafter."""
        return self.grade is None

    @property
    def survival(self) -> list[float]:
        """P(the first i draft tokens are all accepted), i = 1..MAX_GAMMA."""
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
        """P(the drafter proposes at least one token if gamma is above 0); 1 until a step shows
        otherwise."""
        return (1 + self._drafted) / (1 + self._asked)


class AcceptanceHistory(NamedTuple):
    """The acceptance estimates of a sequence: one for each grade of the drafter, and one for
    predicted output (None without predicted output)."""

    drafted: list[AcceptanceEstimate]
    predicted: AcceptanceEstimate | None


class StepCostTable(NamedTuple):
    """Seconds of a step of `num_seqs` sequences, by the number of draft tokens of the sequences
    that gamma is chosen for."""

    num_seqs: int
    # by [largest gamma, draft tokens in all]; [0, 0]: without these draft tokens
    draft_seconds: NDArray[np.float64]  # of the drafter
    target_seconds: NDArray[np.float64]  # of the rest of the step
    positions: NDArray[np.int64]  # of the target's pass, padding included
    seconds_by_gamma: list[float]  # with the same gamma for all sequences
    # seconds and positions by gamma of one sequence, if no other sequence has draft tokens
    single_steps: tuple[list[float], list[int]]
    change: float  # see `Costs.change`

    def target_seconds_after(self, last: int, answers: float) -> NDArray[np.float64]:
        """Return `target_seconds`; to every pass size except `last`, add the cost of a change of
        the size. `last`: positions of the last pass (0: unknown, nothing is added); `answers`: the
        drafter's `answer_rate`."""
        if not last or not self.change:
            return self.target_seconds
        return self.target_seconds + self.amortize_size_change(answers) * (self.positions != last)

    def amortize_size_change(self, answers: float) -> float:
        """Return the cost of a change of the pass size, divided by the expected number of steps
        until the next change."""
        return self.change / (
            SILENT_SIZE_CHANGE_STEPS + (SIZE_CHANGE_STEPS - SILENT_SIZE_CHANGE_STEPS) * answers
        )


@lru_cache(256)
def make_cost_table(
    costs: Costs,
    num_seqs: int,
    other_work: OtherWork = NO_OTHER_WORK,
    count_positions: CountPositions = count_no_padding,
) -> StepCostTable:
    """Return the cost table for draft tokens of `num_seqs` sequences in a pass with `other_work`.

    The time of prefills in the same pass is subtracted: this time does not depend on gamma, and
    would make every draft token seem cheap.
    """
    B, tokens = num_seqs + other_work.num_seqs, num_seqs + other_work.positions
    gammas, draft_tokens = np.arange(MAX_GAMMA + 1), np.arange(num_seqs * MAX_GAMMA + 1)

    def count(width: int, num_tokens: Numbers) -> Numbers:
        positions = count_positions(B, width)
        return num_tokens if positions is None else positions + 0 * num_tokens

    widths = [max(1 + g, other_work.width) for g in range(MAX_GAMMA + 1)]
    positions = np.stack([np.asarray(count(width, tokens + draft_tokens)) for width in widths])
    prefill = costs.target_seconds(positions[0, 0], B) - costs.target_seconds(
        count(1, tokens - other_work.prefill_positions), B
    )
    before = costs.draft_seconds(other_work.depth, 0, B)
    depths = np.maximum(gammas, other_work.depth)[:, None]
    drafting = np.asarray(costs.draft_seconds(depths, draft_tokens, B) - before)
    passing = np.asarray(before - prefill + costs.target_seconds(positions, B + draft_tokens))
    verified = B * (1 + gammas)
    padded = [count(1 + g, n) for g, n in enumerate(verified.tolist())]
    alike = costs.draft_seconds(gammas, B * gammas, B) + costs.target_seconds(
        np.array(padded), verified
    )
    seconds, counts = (passing + drafting)[gammas, gammas], positions[gammas, gammas]
    return StepCostTable(
        B,
        drafting,
        passing,
        positions,
        np.asarray(alike).tolist(),
        (seconds.tolist(), counts.tolist()),
        costs.change,
    )


def get_costs_at_length(costs: Costs, seqs: list[SequenceState], num_others: int = 0) -> Costs:
    """Return the costs at the mean length of `seqs`, for a batch of `seqs` and `num_others` other
    sequences."""
    return costs_at_context(
        costs, count_context_buckets(seqs) * CONTEXT_BUCKET_TOKENS, len(seqs) + num_others
    )


def count_context_buckets(seqs: list[SequenceState]) -> int:
    """Return the mean length of the sequences, in units of `CONTEXT_BUCKET_TOKENS`."""
    return sum(len(seq.tokens) for seq in seqs) // len(seqs) // CONTEXT_BUCKET_TOKENS


def count_forced_tokens(seq: SequenceState) -> int:
    """Return the number of next tokens that the sequence's grammar forces; they can be draft tokens
    without a drafter. Return 0 if the target lately rejected most forced tokens, because it prefers
    another tokenization of the same string."""
    if seq.request.params.structured is None:
        return 0
    steps = [step for step in seq.records[-FORCED_WINDOW_STEPS:] if step.predicted]
    drafted, accepted = sum(step.drafted for step in steps), sum(step.accepted for step in steps)
    if FORCED_PRIOR_TOKENS + accepted < (FORCED_PRIOR_TOKENS + drafted) / 2:
        return 0
    return len(seq.find_forced_tokens(min(MAX_GAMMA, seq.num_remaining - 1)))


def _last_positions(seq: SequenceState) -> int:
    """Return the number of a sequence's positions in its last forward pass (its draft tokens plus
    one); 0 before its first pass."""
    return 1 + seq.records[-1].drafted if seq.records else 0


def find_best_token_rate(
    estimate: AcceptanceEstimate, max_gamma: int, table: StepCostTable
) -> float:
    """Return the tokens per second of a sequence with the best gamma, alone in the batch."""
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
    """Return the gamma of every sequence, at most `max_gammas[b]`, that gives most tokens per
    second in the next step. `last`: positions of the last pass.

    Among the first d draft tokens of each sequence, the n tokens that are most probably accepted
    are chosen. d and n maximize

        (B + s_1 + .. + s_n) / (T_0 + a (T_n - T_0 + D_{d,n}))

    Each of B sequences gains a token. s_i is the probability that draft token i is accepted, in
    falling order. T_n is the time of a pass with n draft tokens, and with padding to the longest
    draft if the target pads its passes. D_{d,n} is the time of drafting these tokens. a is the
    share of steps in which the drafter proposes any token; the other steps gain and cost as much as
    steps of plain decoding.
    """
    answers = np.array([estimate.answer_rate for estimate in estimates])
    # [sequences, MAX_GAMMA]
    survivals = answers[:, None] * np.array([each.survival for each in estimates])
    possible = np.array(max_gammas)[:, None] >= DRAFT_DEPTHS
    chances, (row, place) = survivals[possible], possible.nonzero()
    order = (-chances).argsort(kind="stable")
    if not len(order):
        return [0] * len(estimates)
    row, within = row[order], place[order] < DRAFT_DEPTHS[:, None]  # within: [depth, draft token]
    tokens = table.num_seqs + (within * chances[order]).cumsum(1)  # B + s_1 + .. + s_n
    draft_tokens = within.cumsum(1)
    # a, the share of steps with draft tokens: the mean over the n draft tokens
    answered = (within * answers[row]).cumsum(1) / np.maximum(draft_tokens, 1)
    passing = table.target_seconds_after(last, float(answers.max()))
    plain, at = float(passing[0, 0]), (DRAFT_DEPTHS[:, None], draft_tokens)
    more = passing[at] - plain + table.draft_seconds[at]
    rates = tokens / (plain + answered * more)  # [depth - 1, n - 1]
    depth, end = divmod(int(rates.argmax()), rates.shape[1])
    if rates[depth, end] <= table.num_seqs / plain:
        return [0] * len(estimates)
    chosen = row[: end + 1][within[depth, : end + 1]]
    return [int(g) for g in np.bincount(chosen, minlength=len(estimates))]


def choose_single_gamma(
    estimate: AcceptanceEstimate, max_gamma: int, table: StepCostTable, last: int = 0
) -> int:
    """Return the result of `allot_gammas` for a single sequence, in a tenth of the time because no
    arrays are used."""
    answers, survival = estimate.answer_rate, estimate.survival[:max_gamma]
    change = table.amortize_size_change(answers) if last else 0.0
    seconds, positions = table.single_steps
    plain = seconds[0] + change * (positions[0] != last)
    best, fastest, tokens = 0, 1 / plain, 1.0
    for g, chance in enumerate(survival, 1):
        tokens += answers * chance
        more = seconds[g] + change * (positions[g] != last) - plain
        if tokens / (plain + answers * more) > fastest:
            best, fastest = g, tokens / (plain + answers * more)
    return best


def _choose_exploration(records: list[StepRecord], max_gamma: int, table: StepCostTable) -> int:
    """Return a gamma to try although plain decoding seems fastest; 0 if such tries lost too much
    time lately."""
    if max_gamma < 1:
        return 0
    # a single step with draft tokens changes the pass size twice
    seconds = [each + 2 * table.change * (g > 0) for g, each in enumerate(table.seconds_by_gamma)]
    plain = seconds[0]
    # the gamma that verifies most draft tokens per extra second at an acceptance of one half
    gamma = max(range(1, len(seconds)), key=lambda g: (1 - 0.5**g) / max(seconds[g] - plain, 1e-9))
    gamma = min(gamma, max_gamma)
    time = lost = 0.0
    for step in records[-EXPLORATION_WINDOW_STEPS:]:
        took = seconds[min(step.drafted, len(seconds) - 1)]
        time += took
        lost += took - plain * (1 + step.accepted)
    return gamma if max(0.0, lost) + seconds[gamma] - plain <= MAX_EXPLORATION_SHARE * time else 0
