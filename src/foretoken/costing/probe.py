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
from foretoken.costing.costs import Costs, Far, at, of
from foretoken.costing.stored import Kept
from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.engine.batch import Batch
from foretoken.records import StepRecord
from foretoken.request import Request, Row
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.verifier import choose
from foretoken.sampling.verify import block

log = logging.getLogger(__name__)
# Draft tokens of one row, for passes over 1 to 16 tokens: kernels take rows by fours or sixes, so
# costs rise in steps, which a few sizes would not show.
ALONE = (*range(9), 11, 12, 15)
TWICE = 2  # steps of each size in a row: a pass of another size than the last is slower
SETTLE = 2  # more at the beginning of a round: small passes may be padded to the last sizes
WORTH = 10.0  # weight of the probe's alpha at most, in draft tokens of a new row
SECONDS = 1.0  # no round after the second begins later than this
ROUNDS, FEWEST = 5, 2  # at most, and at least
FAR, NEAR = 1024, 128  # tokens of a longer text, and the fewest that tell something
BEHIND = (0, 1, 2, 4, 8)  # draft tokens of one row behind it
AHEAD, AGAIN = 8, 3  # of a draft's passes that are timed alone: tokens before them, of each size
LEAST = 0.02  # of such a pass over one token, that a further one takes
TOLD = "measuring what steps cost here, once: %s"
STRAY = 4  # one size in so many may differ by more: steps that grow the cache are slow


T = TypeVar("T")


def _most(sizes: tuple[int, ...], rounds: int) -> int:
    """The most tokens that rounds over these sizes generate."""
    return rounds * sum(g + 1 for g in _round(sizes)) + max(sizes) + 2


def _round(sizes: tuple[int, ...]) -> list[int]:
    """The draft tokens of a round's steps."""
    return [sizes[0]] * SETTLE + [size for size in sizes for _ in range(TWICE)]


TOKENS, LONG = _most(ALONE, ROUNDS), _most(BEHIND, FEWEST)


def probe(
    batch: Batch,
    request: Request,
    params: SamplingParams,
    eos: frozenset[int] = frozenset(),
    label: str = "",
) -> Kept:
    """Costs of steps of one row, which ends of sequence, `eos`, do not stop: what follows one is
    timed, and says nothing of how far the two models agree. Less is measured where the request's
    limit is below `TOKENS`. label: what is measured, for the log and the cache. Raises as
    `generate` does; the models must be idle."""
    drafter, reading = _NeverSilent(batch.drafter), contention.read()
    (row,) = _run(batch, drafter, [request], params, ALONE, label=label)
    steps = _settled(row.records, ALONE)
    costs = replace(of(steps), change=_change(row.records))
    costs = replace(costs, context=(len(request.prompt) + len(row.tokens)) // 2)  # on average
    costs = replace(costs, far=_far(batch, request, params, costs))
    if not drafter.made_up:
        costs = replace(costs, prior=_learned(costs.prior, list(_judged(row.records, eos))))
    spread = _spread(steps, [step.drafted for step in steps], ALONE)
    return Kept(costs, spread, contention.share([contention.taken(reading)]), label)


def _far(batch: Batch, request: Request, params: SamplingParams, costs: Costs) -> Far | None:
    """The same behind a longer text, which is read in a second at most; None where none is long
    enough to tell, and for an encoder-decoder."""
    most = int(16 * SECONDS / float(at(costs.score, 16)))
    room = FAR + LONG if batch.target.context is None else batch.target.context
    length = min(FAR, most, room - LONG)
    if batch.target.encoder_decoder or length < costs.context + NEAR:
        return None
    text = (request.prompt * (1 + length // len(request.prompt)))[:length]
    longer = replace(request, prompt=text, limit=LONG)
    (row,) = _run(batch, _NeverSilent(batch.drafter), [longer], params, BEHIND, FEWEST)
    told = of(_settled(row.records, BEHIND))
    return Far(length, told.draft, told.score)


def probe_shared(
    costs: Costs,
    batch: Batch,
    request: Request,
    params: SamplingParams,
    rows: int,
    label: str = "",
) -> Kept:
    """`costs`, extended by steps of so many rows, all like `request`."""
    sizes, reading = shared(rows), contention.read()
    drafter, requests = _NeverSilent(batch.drafter), [request] * rows
    rows_run = _run(batch, drafter, requests, params, sizes, label=label)
    steps = _settled(rows_run[0].records, sizes)
    together = zip(*(row.records for row in rows_run), strict=False)  # to where the first one ends
    drafted = [sum(step.drafted for step in each) for each in together]
    draft_tokens = _settled(drafted, sizes)
    spread = _spread(steps, draft_tokens, sizes)
    others = contention.share([contention.taken(reading)])
    return Kept(costs.among(steps, draft_tokens, rows), spread, others, label)


def shared(rows: int) -> tuple[int, ...]:
    """Guesses of so many rows together."""
    return tuple(sorted({0, rows // 2, rows, 3 * rows}))


def _spread(
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
    ratios = [float(at(even, size)) / float(at(odd, size)) for size in sizes]
    return sorted(max(ratio, 1 / ratio) for ratio in ratios)[-1 - len(sizes) // STRAY]


def _run(
    batch: Batch,
    drafter: _NeverSilent,
    requests: list[Request],
    params: SamplingParams,
    sizes: tuple[int, ...],
    most: int = ROUNDS,
    label: str = "",
) -> list[Row]:
    """Rows that have been through rounds over the sizes, two to `most`; the first one has guessed
    most. label: what is measured, logged where that takes long."""
    rows = [Row.of(replace(request, params=params)) for request in requests]
    batch, verifier, gammas = Batch(batch.target, drafter), choose(block), _round(sizes)
    start, steps = perf_counter(), 0
    try:
        batch.join(rows)
        while batch.rows:
            every, more = divmod(gammas[steps % len(gammas)], len(batch.rows))
            batch.step(verifier, [every + (b < more) for b in range(len(batch.rows))])
            steps += 1
            rounds, within = divmod(steps, len(gammas))
            elapsed = perf_counter() - start
            if label and elapsed > slow_log.AFTER:
                slow_log.tell(log, TOLD, label)
                label = ""
            late = elapsed > SECONDS
            if not within and (rounds >= most or (rounds >= FEWEST and late)):
                break
    finally:
        batch.clear()
    return rows


def _judged(steps: list[StepRecord], eos: frozenset[int]) -> Iterator[float]:
    """The overlaps at the places of the text, up to its first end."""
    for step in steps:
        for token, overlap in zip_longest(step.kept, step.overlaps):
            if overlap is not None:
                yield overlap
            if token in eos:
                return


def _learned(prior: tuple[float, float], overlaps: list[float]) -> tuple[float, float]:
    """Return a `Costs.prior` updated by draft tokens with these overlaps."""
    worth, alpha = prior
    weight = worth + len(overlaps)
    return min(WORTH, weight), (worth * alpha + sum(overlaps)) / weight


def _settled(each: list[T], sizes: tuple[int, ...]) -> list[T]:
    """Return the last step of each size in each round; all steps where no round got so far."""
    length = len(_round(sizes))
    last = range(SETTLE + TWICE - 1, length, TWICE)
    return [x for i, x in enumerate(each) if i % length in last] or each


def _change(steps: list[StepRecord]) -> float:
    """Seconds that the first pass of a size takes more than the next one of it: the median."""
    more = [
        one.score_seconds - other.score_seconds
        for before, one, other in zip(steps, steps[1:], steps[2:], strict=False)
        if before.drafted != one.drafted == other.drafted
    ]
    return max(0.0, median_low(more)) if more else 0.0


class _NeverSilent(Drafter):
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
