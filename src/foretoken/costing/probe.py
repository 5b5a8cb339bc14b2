"""Costs of steps, measured on the pair at hand: real steps through the engine, of several sizes.

Their text is thrown away, so guesses may be made up where the drafter has none.
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
from foretoken.records import StepRecord
from foretoken.request import Request, SequenceState
from foretoken.sampling.acceptance_rules import block
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.verifier import make_verifier

log = logging.getLogger(__name__)
# Draft tokens of one row, for passes over 1 to 16 tokens: kernels take rows by fours or sixes, so
# costs rise in steps, which a few sizes would not show.
SINGLE_DRAFT_SIZES = (*range(9), 11, 12, 15)
STEPS_PER_SIZE = 2  # steps of each size in a row: a pass of another size than the last is slower
SETTLING_STEPS = 2  # more at the beginning of a round: small passes may be padded to the last sizes
MAX_PRIOR_WEIGHT = 10.0  # weight of the probe's alpha at most, in draft tokens of a new row
MAX_PROBE_SECONDS = 1.0  # no round after the second begins later than this
MAX_ROUNDS, MIN_ROUNDS = 5, 2  # at most, and at least
LONG_CONTEXT_TOKENS, MIN_EXTRA_CONTEXT_TOKENS = (
    1024,
    128,
)  # tokens of a longer text, and the fewest that tell something
LONG_CONTEXT_DRAFT_SIZES = (0, 1, 2, 4, 8)  # draft tokens of one row behind it
AHEAD, AGAIN = 8, 3  # of a draft's passes that are timed alone: tokens before them, of each size
LEAST = 0.02  # of such a pass over one token, that a further one takes
MEASURING_MESSAGE = "measuring what steps cost here, once: %s"
OUTLIER_DIVISOR = 4  # one size in so many may differ by more: steps that grow the cache are slow


T = TypeVar("T")


def _max_tokens(sizes: tuple[int, ...], rounds: int) -> int:
    """The most tokens that rounds over these sizes generate."""
    return rounds * sum(g + 1 for g in _list_round(sizes)) + max(sizes) + 2


def _list_round(sizes: tuple[int, ...]) -> list[int]:
    """The draft tokens of a round's steps."""
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
    """Costs of steps of one row, which ends of sequence, `eos`, do not stop: what follows one is
    timed, and says nothing of how far the two models agree. Less is measured where the request's
    limit is below `PROBE_TOKENS`. label: what is measured, for the log and the cache. Raises as
    `generate` does; the models must be idle."""
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
    """The same behind a longer text, which is read in a second at most; None where none is long
    enough to tell, and for an encoder-decoder."""
    max_tokens = int(16 * MAX_PROBE_SECONDS / float(interpolate(costs.score, 16)))
    room = (
        LONG_CONTEXT_TOKENS + LONG_CONTEXT_PROBE_TOKENS
        if batch.target.context is None
        else batch.target.context
    )
    length = min(LONG_CONTEXT_TOKENS, max_tokens, room - LONG_CONTEXT_PROBE_TOKENS)
    if batch.target.encoder_decoder or length < costs.context + MIN_EXTRA_CONTEXT_TOKENS:
        return None
    text = (request.prompt * (1 + length // len(request.prompt)))[:length]
    longer = replace(request, prompt=text, limit=LONG_CONTEXT_PROBE_TOKENS)
    (seq,) = _run_rounds(
        batch,
        _AlwaysProposingDrafter(batch.drafter),
        [longer],
        params,
        LONG_CONTEXT_DRAFT_SIZES,
        MIN_ROUNDS,
    )
    long_costs = costs_from_steps(_drop_settling(seq.records, LONG_CONTEXT_DRAFT_SIZES))
    return LongContextCosts(length, long_costs.draft, long_costs.score)


def probe_shared(
    costs: Costs,
    batch: Batch,
    request: Request,
    params: SamplingParams,
    batch_size: int,
    label: str = "",
) -> StoredCosts:
    """`costs`, extended by steps of so many rows, all like `request`."""
    sizes, reading = shared_draft_sizes(batch_size), contention.take_reading()
    drafter, requests = _AlwaysProposingDrafter(batch.drafter), [request] * batch_size
    rows_run = _run_rounds(batch, drafter, requests, params, sizes, label=label)
    steps = _drop_settling(rows_run[0].records, sizes)
    step_records = zip(
        *(seq.records for seq in rows_run), strict=False
    )  # to where the first one ends
    drafted = [sum(step.drafted for step in each) for each in step_records]
    draft_tokens = _drop_settling(drafted, sizes)
    spread = _compare_halves(steps, draft_tokens, sizes)
    others = contention.compute_others_share([contention.measure_since(reading)])
    return StoredCosts(
        costs.extend_to_batch(steps, draft_tokens, batch_size), spread, others, label
    )


def shared_draft_sizes(batch_size: int) -> tuple[int, ...]:
    """Guesses of so many rows together."""
    return tuple(sorted({0, batch_size // 2, batch_size, 3 * batch_size}))


def _compare_halves(
    steps: list[StepRecord], draft_tokens: list[int], sizes: tuple[int, ...]
) -> float | None:
    """By how much odd and even rounds differ, but for a few sizes."""
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
    """Rows that have been through rounds over the sizes, two to `max_rounds`; the first one has
    guessed most. label: what is measured, logged where that takes long."""
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
    """The overlaps at the places of the text, up to its first end."""
    for step in steps:
        for token, overlap in zip_longest(step.new_tokens, step.overlaps):
            if overlap is not None:
                yield overlap
            if token in eos:
                return


def _update_prior(prior: tuple[float, float], overlaps: list[float]) -> tuple[float, float]:
    """Return a `Costs.prior` updated by draft tokens with these overlaps."""
    prior_weight, alpha = prior
    weight = prior_weight + len(overlaps)
    return min(MAX_PRIOR_WEIGHT, weight), (prior_weight * alpha + sum(overlaps)) / weight


def _drop_settling(each: list[T], sizes: tuple[int, ...]) -> list[T]:
    """Return the last step of each size in each round; all steps where no round got so far."""
    length = len(_list_round(sizes))
    last = range(SETTLING_STEPS + STEPS_PER_SIZE - 1, length, STEPS_PER_SIZE)
    return [x for i, x in enumerate(each) if i % length in last] or each


def _measure_size_change(steps: list[StepRecord]) -> float:
    """Seconds that the first pass of a size takes more than the next one of it: the median."""
    more = [
        one.score_seconds - other.score_seconds
        for before, one, other in zip(steps, steps[1:], steps[2:], strict=False)
        if before.drafted != one.drafted == other.drafted
    ]
    return max(0.0, median_low(more)) if more else 0.0


class _AlwaysProposingDrafter(Drafter):
    """The drafter, with made-up guesses where it has none: passes are timed at full length."""

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
