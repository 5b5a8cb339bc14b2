"""Measures the costs of a pair by real steps of the engine with several numbers of draft tokens.

The output is discarded, so draft tokens may be made up if the drafter proposes none.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from itertools import zip_longest
from statistics import median_low
from time import perf_counter
from typing import TypeVar

from foretoken import slow_log
from foretoken.costing import contention
from foretoken.costing.costs import Costs, LongContextCosts, costs_from_steps, interpolate
from foretoken.costing.stored_costs import StoredCosts
from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.engine.batch import Batch
from foretoken.models.base import Model
from foretoken.records import StepRecord
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.verifier import make_verifier

log = logging.getLogger(__name__)
# Draft tokens per step at batch size 1, for passes over 1 to 16 tokens. Kernels process tokens in
# groups of four or six, so costs rise in jumps, which fewer sizes would miss.
SINGLE_DRAFT_SIZES = (*range(9), 11, 12, 15)
PADDED_GAMMAS = (0, 1, 2, 4, 8)  # at larger batch sizes, if the target pads its passes
STEPS_PER_SIZE = 2  # in succession: the first pass after a change of size is slower
SETTLING_STEPS = 2  # extra steps at the start of a round: passes may be padded to the last sizes
MAX_PRIOR_WEIGHT = 10.0  # weight of the measured alpha in a new sequence's prior, in draft tokens
MAX_PROBE_SECONDS = 1.0  # after this time, no round begins except the second
MAX_ROUNDS, MIN_ROUNDS = 5, 2
# context length of the second measurement, and its minimum difference from that of the first one
LONG_CONTEXT_TOKENS, MIN_EXTRA_CONTEXT_TOKENS = 1024, 128
# its prefill's maximum time, at the speed of passes over 16 tokens; longer passes are faster
MAX_PREFILL_SECONDS = 4.0
LONG_CONTEXT_DRAFT_SIZES = (0, 1, 2, 4, 8)  # draft tokens per step at that length
MEASURING_MESSAGE = "measuring step costs on this machine, once: %s"
OUTLIER_DIVISOR = 4  # one size in 4 may differ by more: steps in which the cache grows are slow


Result = TypeVar("Result")


def _max_tokens(sizes: tuple[int, ...], rounds: int) -> int:
    return rounds * sum(g + 1 for g in _list_round(sizes)) + max(sizes) + 2


def _list_round(sizes: tuple[int, ...]) -> list[int]:
    """Return the number of draft tokens of each step of a round: first the settling steps, then
    `STEPS_PER_SIZE` steps of each size."""
    return [sizes[0]] * SETTLING_STEPS + [size for size in sizes for _ in range(STEPS_PER_SIZE)]


PROBE_TOKENS, LONG_CONTEXT_PROBE_TOKENS = (
    _max_tokens(SINGLE_DRAFT_SIZES, MAX_ROUNDS),
    _max_tokens(LONG_CONTEXT_DRAFT_SIZES, MIN_ROUNDS),
)


def probe(
    batch: Batch,
    request: Request,
    params: SamplingParams,
    eos: frozenset[int] = frozenset(),
    label: str = "",
) -> StoredCosts:
    """Measure the costs of steps at batch size 1. The models must be idle.

    Args:
        batch: The batch with the target and the drafter.
        request: A prompt to generate from; fewer steps are measured if its limit is below
            `PROBE_TOKENS`.
        params: The sampling params to measure.
        eos: The end-of-sequence tokens. They do not stop the generation, but acceptance is not
            counted after an end-of-sequence token.
        label: A description of the measurement, for the log and the cache.

    Returns:
        The costs and the circumstances of their measurement.
    """
    drafter, reading = _AlwaysProposingDrafter(batch.drafter), contention.take_reading()
    (seq,) = _run_rounds(batch, drafter, [request], params, SINGLE_DRAFT_SIZES, label=label)
    steps = _drop_settling(seq.records, SINGLE_DRAFT_SIZES)
    costs = replace(costs_from_steps(steps), change=_measure_size_change(seq.records))
    costs = replace(costs, context=(len(request.prompt) + len(seq.tokens)) // 2)  # on average
    costs = replace(costs, far=_probe_long_context(batch, request, params, costs))
    if not drafter.made_up:
        costs = replace(
            costs, prior=_update_prior(costs.prior, list(_iter_overlaps(seq.records, eos)))
        )
    spread = _compare_halves(steps, [step.drafted for step in steps], SINGLE_DRAFT_SIZES)
    return StoredCosts(
        costs, spread, contention.compute_others_share([contention.measure_since(reading)]), label
    )


def _probe_long_context(
    batch: Batch, request: Request, params: SamplingParams, costs: Costs
) -> LongContextCosts | None:
    """Measure the costs at a longer context whose prefill takes a few seconds at most. Return None
    for an encoder-decoder, or if that context would not be much longer than `costs.context`."""
    max_tokens = int(16 * MAX_PREFILL_SECONDS / float(interpolate(costs.score, 16)))
    room = (
        LONG_CONTEXT_TOKENS + LONG_CONTEXT_PROBE_TOKENS
        if batch.target.context is None
        else batch.target.context
    )
    length = min(LONG_CONTEXT_TOKENS, max_tokens, room - LONG_CONTEXT_PROBE_TOKENS)
    if batch.target.encoder_decoder or length < costs.context + MIN_EXTRA_CONTEXT_TOKENS:
        return None
    prompt = (request.prompt * (1 + length // len(request.prompt)))[:length]
    longer = replace(request, prompt=prompt, limit=LONG_CONTEXT_PROBE_TOKENS)
    (seq,) = _run_rounds(
        batch,
        _AlwaysProposingDrafter(batch.drafter),
        [longer],
        params,
        LONG_CONTEXT_DRAFT_SIZES,
        MIN_ROUNDS,
    )
    long_costs = costs_from_steps(_drop_settling(seq.records, LONG_CONTEXT_DRAFT_SIZES))
    model = batch.drafter.model
    limit = model.max_attended_tokens if isinstance(model, Model) else None
    return LongContextCosts(length, long_costs.draft, long_costs.score, limit)


def probe_shared(
    costs: Costs,
    batch: Batch,
    request: Request,
    params: SamplingParams,
    batch_size: int,
    label: str = "",
) -> StoredCosts:
    """Return `costs` extended by measured steps of `batch_size` sequences, all like `request`."""
    padded = batch.target.count_padded_positions(batch_size, 1) is not None
    sizes, reading = list_shared_draft_sizes(batch_size, padded), contention.take_reading()
    drafter, requests = _AlwaysProposingDrafter(batch.drafter), [request] * batch_size
    seqs = _run_rounds(batch, drafter, requests, params, sizes, label=label)
    steps = _drop_settling(seqs[0].records, sizes)
    # only the steps before the first sequence finishes: in these, all sequences run
    step_records = zip(*(seq.records for seq in seqs), strict=False)
    drafted = [sum(step.drafted for step in each) for each in step_records]
    draft_tokens = _drop_settling(drafted, sizes)
    spread = _compare_halves(steps, draft_tokens, sizes)
    others = contention.compute_others_share([contention.measure_since(reading)])
    return StoredCosts(
        costs.extend_to_batch(steps, draft_tokens, batch_size), spread, others, label
    )


def list_shared_draft_sizes(batch_size: int, padded: bool) -> tuple[int, ...]:
    """Return the numbers of draft tokens per step, summed over all sequences, at which steps are
    measured. padded: whether the target pads its passes to the longest draft; then all sequences
    draft as many."""
    if padded:
        return tuple(batch_size * gamma for gamma in PADDED_GAMMAS)
    return tuple(sorted({0, batch_size // 2, batch_size, 3 * batch_size}))


def _compare_halves(
    steps: list[StepRecord], draft_tokens: list[int], sizes: tuple[int, ...]
) -> float | None:
    """Compare the step times of odd and even rounds at each size, as a ratio of 1 or more. Return
    the greatest ratio, leaving out a few outlier sizes; None if there was one round only."""
    halves: list[dict[int, list[float]]] = [{}, {}]
    for i, (step, count) in enumerate(zip(steps, draft_tokens, strict=True)):
        seconds = step.draft_seconds + step.score_seconds + step.verify_seconds
        halves[i // len(sizes) % 2].setdefault(count, []).append(seconds)
    if not all(halves):
        return None
    even, odd = (tuple((n, median_low(half[n])) for n in sorted(half)) for half in halves)
    ratios = [float(interpolate(even, size)) / float(interpolate(odd, size)) for size in sizes]
    return sorted(max(ratio, 1 / ratio) for ratio in ratios)[-1 - len(sizes) // OUTLIER_DIVISOR]


def _run_rounds(
    batch: Batch,
    drafter: _AlwaysProposingDrafter,
    requests: list[Request],
    params: SamplingParams,
    sizes: tuple[int, ...],
    max_rounds: int = MAX_ROUNDS,
    label: str = "",
) -> list[SequenceState]:
    """Run two to `max_rounds` rounds over the sizes and return the sequences; in each
    step, the first sequence has the most draft tokens. If the rounds take long, log `label`."""
    seqs = [SequenceState.from_request(replace(request, params=params)) for request in requests]
    batch, verifier, gammas = Batch(batch.target, drafter), make_verifier(block), _list_round(sizes)
    start, steps = perf_counter(), 0
    try:
        batch.join(seqs)
        while batch.seqs:
            every, more = divmod(gammas[steps % len(gammas)], len(batch.seqs))
            batch.step(verifier, [every + (b < more) for b in range(len(batch.seqs))])
            steps += 1
            rounds, within = divmod(steps, len(gammas))
            elapsed = perf_counter() - start
            if label and elapsed > slow_log.LOG_AFTER_SECONDS:
                slow_log.log_visibly(log, MEASURING_MESSAGE, label)
                label = ""
            late = elapsed > MAX_PROBE_SECONDS
            if not within and (rounds >= max_rounds or (rounds >= MIN_ROUNDS and late)):
                break
    finally:
        batch.clear()
    return seqs


def _iter_overlaps(steps: list[StepRecord], eos: frozenset[int]) -> Iterator[float]:
    """Yield the overlap (beta) of each verified draft token, up to the first end-of-sequence
    token."""
    for step in steps:
        for token, overlap in zip_longest(step.new_tokens, step.overlaps):
            if overlap is not None:
                yield overlap
            if token in eos:
                return


def _update_prior(prior: tuple[float, float], overlaps: list[float]) -> tuple[float, float]:
    """Return the new value of `Costs.prior` after draft tokens with these overlaps."""
    prior_weight, alpha = prior
    weight = prior_weight + len(overlaps)
    return min(MAX_PRIOR_WEIGHT, weight), (prior_weight * alpha + sum(overlaps)) / weight


def _drop_settling(each: list[Result], sizes: tuple[int, ...]) -> list[Result]:
    """Return the entries of `each`, a list with one entry per step, that count. A round runs
    settling steps, then STEPS_PER_SIZE steps of each size, of which only the last one counts. If no
    size was completed, all entries count."""
    length = len(_list_round(sizes))
    last = range(SETTLING_STEPS + STEPS_PER_SIZE - 1, length, STEPS_PER_SIZE)
    return [x for i, x in enumerate(each) if i % length in last] or each


def _measure_size_change(steps: list[StepRecord]) -> float:
    """Return the median of the seconds by which the first pass after a change of size takes longer
    than the second."""
    more = [
        one.score_seconds - other.score_seconds
        for before, one, other in zip(steps, steps[1:], steps[2:], strict=False)
        if before.drafted != one.drafted == other.drafted
    ]
    return max(0.0, median_low(more)) if more else 0.0


class _AlwaysProposingDrafter(Drafter):
    """A drafter that replaces the draft of `drafter` by made-up tokens if the draft is too short,
    so that each pass has its full size."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.holds = drafter, (drafter,)
        self.made_up = False

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.drafter.start(rows, prompts, sources)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = self.drafter.propose(list(gamma), draw)
        drafted = getattr(draft.lengths, "tolist", list)()  # the step refuses another type
        pairs = zip(drafted, gamma, strict=False)
        short = len(drafted) == len(gamma) and all(n < g for n, g in pairs)
        self.made_up |= short and any(gamma)
        return pack([[0] * g for g in gamma]) if short else draft

    def commit(self, tokens: list[list[int]]) -> None:
        self.drafter.commit(tokens)

    def leave(self, rows: list[int]) -> None:
        self.drafter.leave(rows)
