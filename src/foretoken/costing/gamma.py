"""Policies that choose gamma for each sequence before each step (paper, sections 3.5 and 5: varying
gamma).

A policy depends on the sequences' step records, never on a clock. `AdaptiveGamma` takes frozen step
costs and estimates of each sequence's acceptance, and chooses, for all sequences of a forward pass
together, the draft tokens that give most new tokens per second. A sequence's draft tokens may come
from several sources: the drafters of a `DrafterChoice`, and predicted output. Each source has an
acceptance estimate, and the source that is fastest for the sequence is used. For a sequence with
`deterministic` set, gamma is chosen as if the sequence were alone in the batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

from foretoken.costing.costs import Costs, Numbers, costs_at_context
from foretoken.records import StepRecord
from foretoken.request import OutputPredictor, SequenceState

MAX_GAMMA = 16
DRAFT_DEPTHS = np.arange(1, MAX_GAMMA + 1)
EXPLORATION_WINDOW_STEPS = 256  # steps over which the time lost on exploration is counted
# factors by which the weights of observations shrink in each step with, and without, draft tokens
DRAFT_STEP_DECAY, PLAIN_STEP_DECAY = 0.94, 0.96
MIN_PRIOR_WEIGHT = 0.04  # share of the prior's weight that never decays
DEPTH_PRIOR_WEIGHT = 10.0  # weight of position i - 1's acceptance as the prior of position i
REUSE_DECISION_STEPS = 4  # without draft tokens, choose only in every 4th step
TRIAL_GAMMA = 4  # draft tokens assumed for a step that tries another drafter
MAX_EXPLORATION_SHARE = 0.01  # share of the time that draft tokens may lose to try them
SIZE_CHANGE_STEPS = 4.0  # expected steps until the pass size changes again; they share the cost
CONTEXT_BUCKET_TOKENS = 256  # sequence lengths are rounded to multiples of this
SILENT_SIZE_CHANGE_STEPS = 0.5  # the same if the drafter rarely proposes: the size changes back
PREDICTED = -1  # number of the source "predicted output"; drafters have numbers from 0
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
    # of a `DrafterChoice`: costs like `costs` and `single_costs` of each drafter, which is a grade
    alternatives: tuple[tuple[Costs, Costs], ...] = ()
    _histories: list[tuple[SequenceState, AcceptanceHistory]] = field(
        default_factory=list[tuple[SequenceState, "AcceptanceHistory"]], init=False
    )
    _last_size: int = field(default=0, init=False)  # positions of the last forward pass
    # cached cost tables, with the arguments that they were computed for
    _table: tuple[Hashable, StepCostTable] | None = field(default=None, init=False)
    _single_seq_tables: tuple[int, list[StepCostTable], StepCostTable] | None = field(
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
            for estimate in history.drafted:
                estimate.add_new_steps(seq.records)
            if history.predicted is not None:
                history.predicted.add_new_steps(seq.records, seq.new_tokens)

    def _choose_by_source(
        self, seqs: list[SequenceState], sources: list[AcceptanceEstimate], other_work: OtherWork
    ) -> list[int]:
        """Return gamma of every sequence; `sources[b]` estimates the acceptance of sequence b's
        draft tokens.

        Gamma is chosen first for each deterministic sequence by itself, then for all sequences with
        predicted output together, and last for all sequences of each drafter together. Each of
        these groups counts the positions of earlier groups as other work.
        """
        gammas: dict[int, int] = {}  # by index
        for b, seq in enumerate(seqs):
            if seq.request.params.deterministic:
                (gammas[b],) = self._choose_for_source(
                    [(seq, sources[b])], NO_OTHER_WORK, _last_positions(seq), single=True
                )
        numbers = [self._number_source(source) for source in sources]
        for number in sorted(set(numbers)):
            group = [b for b, each in enumerate(numbers) if b not in gammas and each == number]
            if not group:
                continue
            others = len(seqs) - len(group)
            drafted = (
                gammas.get(b, 0) for b, each in enumerate(numbers) if each == number != PREDICTED
            )
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
            gammas |= zip(group, self._choose_for_source(pairs, taken, last), strict=True)
        return [gammas[b] for b in range(len(seqs))]

    def _number_source(self, source: AcceptanceEstimate) -> int:
        """Return the index of the source's drafter, or `PREDICTED`."""
        if source.grade is None:
            return PREDICTED
        return source.grade if self.alternatives else 0

    def _get_costs(self, number: int, *, single: bool) -> Costs:
        """Return the costs of a source, given its number; `single`: for batch size 1."""
        if self.alternatives:
            return self.alternatives[max(number, 0)][single]
        return (self.single_costs or self.costs) if single else self.costs

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
        alternatives = tuple(single.prior for _, single in self.alternatives)
        single_costs = self.single_costs or self.costs
        priors = enumerate(alternatives or self.priors or (single_costs.prior,))
        return AcceptanceHistory(
            [AcceptanceEstimate(prior, grade) for grade, prior in priors],
            None if expected is None else PredictionHistory(expected),
        )

    def _pick_source(self, seq: SequenceState, history: AcceptanceHistory) -> AcceptanceEstimate:
        """Choose the source of a sequence's draft tokens, and return its acceptance estimate: the
        predicted output if it has a next token and is the fastest source for the sequence alone,
        else the fastest drafter. Set the sequence's `uses_prediction` and, to choose a drafter,
        its `grade`.

        A prediction of low grade replaces only drafters that do not pay: where predictions are
        right, drafters are better than on average, too.
        """
        predictions = history.predicted
        seq.uses_prediction = predictions is not None and bool(seq.predict_tokens(1))
        if not seq.uses_prediction and not self.alternatives:
            return history.drafted[seq.grade]
        max_gamma = min(seq.num_remaining - 1, MAX_GAMMA)
        tables, without_drafting = self._single_tables(seq)
        plain_rate = best_rate = 1 / without_drafting.seconds_by_gamma[0]
        if self.alternatives:
            rates = [
                find_best_token_rate(estimate, max_gamma, table)
                for estimate, table in zip(history.drafted, tables, strict=True)
            ]
            seq.grade = self._choose_alternative(seq, rates, tables)
            best_rate = max(rates)
        elif self.drafts:
            best_rate = find_best_token_rate(history.drafted[seq.grade], max_gamma, tables[0])
        if predictions is not None and seq.uses_prediction:
            # if no source pays, the drafter: predictions are observed without being used
            seq.uses_prediction = not self.drafts or (
                (seq.is_prediction_confident or best_rate <= plain_rate)
                and find_best_token_rate(predictions.next_estimate, max_gamma, without_drafting)
                > best_rate
            )
            if seq.uses_prediction:
                return predictions.next_estimate
        return history.drafted[seq.grade]

    def _choose_alternative(
        self, seq: SequenceState, rates: list[float], tables: list[StepCostTable]
    ) -> int:
        """Return the index of the drafter with the most tokens per second, given in `rates`. Now
        and then return another drafter, to try it again."""
        best = rates.index(max(rates))
        for i, table in enumerate(tables):
            lost = table.seconds_by_gamma[TRIAL_GAMMA] * (1 - rates[i] / rates[best])
            if i != best and _can_try(seq.records, i, lost, rates[best], table):
                return i
        return best

    def _single_tables(self, seq: SequenceState) -> tuple[list[StepCostTable], StepCostTable]:
        """Return cost tables for batch size 1: one for each drafter, and one with draft tokens that
        take no time."""
        length = count_context_buckets([seq])
        if self._single_seq_tables is None or self._single_seq_tables[0] != length:
            numbers = range(max(1, len(self.alternatives)))
            costs = [get_costs_at_length(self._get_costs(n, single=True), [seq]) for n in numbers]
            self._single_seq_tables = (
                length,
                [make_cost_table(each, 1, count_positions=self.count_positions) for each in costs],
                make_cost_table(
                    costs[0].without_draft_seconds, 1, count_positions=self.count_positions
                ),
            )
        return self._single_seq_tables[1:]

    def _choose_for_source(
        self,
        seqs: list[tuple[SequenceState, AcceptanceEstimate]],
        other_work: OtherWork,
        last: int,
        *,
        single: bool = False,
    ) -> list[int]:
        """Return gamma of these sequences for the step after a pass over `last` positions. All
        sequences use the same drafter, or all use predicted output. `single`: use the costs for
        batch size 1. Now and then, a sequence whose best gamma is 0 tries a few draft tokens of the
        drafter."""
        number = self._number_source(seqs[0][1])
        table = self._cost_table(number, [seq for seq, _ in seqs], other_work, single=single)
        max_gammas = [min(seq.num_remaining - 1, MAX_GAMMA) for seq, _ in seqs]
        if table.num_seqs == 1:
            gamma = [choose_single_gamma(seqs[0][1], max_gammas[0], table, last)]
        else:
            gamma = allot_gammas([source for _, source in seqs], max_gammas, table, last)
        if number == PREDICTED:  # observed without being tried
            return gamma
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
        self, number: int, seqs: list[SequenceState], other_work: OtherWork, *, single: bool
    ) -> StepCostTable:
        """Return the cost table for these sequences. The last table, which is valid for many steps,
        is cached here: a look-up in the cache of `make_cost_table` hashes all numbers of `costs`,
        which takes longer than the choice of gamma."""
        key = (number, single, count_context_buckets(seqs), len(seqs), other_work)
        if self._table is None or self._table[0] != key:
            costs = self._get_costs(number, single=single)
            costs = get_costs_at_length(costs, seqs, other_work.num_seqs)
            costs = costs.without_draft_seconds if number == PREDICTED else costs
            table = make_cost_table(costs, len(seqs), other_work, self.count_positions)
            self._table = key, table
        return self._table[1]


class AcceptanceEstimate:
    """The acceptance of a sequence's draft tokens, estimated from its steps; older steps count
    less.

    The estimate is a mean of beta = sum min(p, q) over verified draft tokens, because beta varies
    less than the share of accepted tokens; draft tokens after a rejection do not count. The
    estimate begins with `prior`: a number of draft tokens and their mean beta. Only steps in which
    the drafter drafted with this `grade` count. `grade` is None for predicted output.
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
        if step.predicted or step.grade != self.grade:
            return
        fade = DRAFT_STEP_DECAY if step.drafted else PLAIN_STEP_DECAY
        self._asked = self._asked * fade + (step.gamma > 0)
        self._drafted = self._drafted * fade + (step.drafted > 0)
        self.add_overlaps(step.overlaps, fade)

    def add_overlaps(self, overlaps: Sequence[float], fade: float) -> None:
        """Add the beta of each verified draft token of a draft. The weights of earlier drafts
        shrink by the factor `fade`."""
        self._hits = [hit * fade for hit in self._hits]
        self._seen = [count * fade for count in self._seen]
        self._worth = max(self._worth * fade, self._least)
        for i, beta in enumerate(overlaps[:MAX_GAMMA]):
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


class PredictionHistory:
    """The acceptance of a sequence's predicted output, by grade, estimated from all output tokens.

    The new tokens of each step are compared with what was predicted for them: up to the first token
    that differs, then with the prediction after this token. So predictions are observed in all
    steps, whatever the draft tokens came from, and need not be tried (as in Not-a-Bandit, arXiv
    2510.20064). The output has the target's distribution, so the mean of a comparison is beta.
    """

    def __init__(self, predictor: OutputPredictor) -> None:
        self.predictor, self.steps = predictor, 0
        self.estimates = [AcceptanceEstimate(prior, None) for prior in predictor.priors]
        self._start = 0  # output tokens that were compared

    @property
    def next_estimate(self) -> AcceptanceEstimate:
        """The estimate for the prediction that was made last."""
        return self.estimates[self.predictor.grade]

    def add_new_steps(self, records: list[StepRecord], tokens: list[int]) -> None:
        """Compare predictions with the new tokens of the steps that were not added yet. `tokens`:
        the whole output."""
        for step in records[self.steps :]:
            self.steps += 1
            end = self._start + len(step.new_tokens)
            while self._start < end:
                actual = tokens[self._start : end]
                predicted = self.predictor.predict_next(tokens[: self._start], len(actual))
                equal = [a == b for a, b in zip(predicted, actual, strict=False)]
                compared = equal[: equal.index(False) + 1] if False in equal else equal
                if compared:
                    overlaps = [float(each) for each in compared]
                    self.next_estimate.add_overlaps(overlaps, DRAFT_STEP_DECAY)
                self._start += max(1, len(compared))


class AcceptanceHistory(NamedTuple):
    """The acceptance estimates of a sequence: one for each grade of the drafter, and those of
    predicted output (None without predicted output)."""

    drafted: list[AcceptanceEstimate]
    predicted: PredictionHistory | None


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


def _can_try(
    records: list[StepRecord], grade: int, lost: float, best_rate: float, table: StepCostTable
) -> bool:
    """Return whether to try the drafter of this `grade` in a step although another drafter gives
    more tokens per second, `best_rate`: whether the drafter's last steps and this step, expected to
    lose `lost` seconds, lose little of the time."""
    time = tried = 0.0
    for step in records[-EXPLORATION_WINDOW_STEPS:]:
        expected = (1 + step.accepted) / best_rate
        time += expected
        if step.grade == grade and not step.predicted:
            tried += table.seconds_by_gamma[min(step.drafted, MAX_GAMMA)] - expected
    return max(0.0, tried) + lost <= MAX_EXPLORATION_SHARE * time
