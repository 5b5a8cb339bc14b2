"""Algorithm 1 on a ragged batch: draft, score, verify, commit.

Plain decoding is this step with gamma 0. Knows protocols only: any model, any drafter, any judge.
"""
# torch leaves the type of tolist() open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain, pairwise
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter
from foretoken.errors import ControlError, RefusedError
from foretoken.models.base import Scorer
from foretoken.records import StepRecord
from foretoken.request import Row, Seen
from foretoken.sampling.distributions import (
    invalid,
    known_finite,
    law,
    mended,
    require_finite,
    require_mass,
    working,
)
from foretoken.sampling.draw import Draw
from foretoken.sampling.judge import Judge, JudgedBlock, Verdict
from foretoken.sampling.logprobs import logprobs
from foretoken.sampling.verify import live
from foretoken.transfer import read, sent


class _DeadEnd(NamedTuple):
    """A row's first position without a law: its controls leave none, or its logits are invalid."""

    place: int
    error: RefusedError


class _Guessed(NamedTuple):
    """The rows that are advanced, and what was guessed for them."""

    places: list[int]  # of the rows in the batch
    rows: list[Row]
    gamma: list[int]
    draft: Draft
    counts: list[int]  # guesses
    draw: Draw


class _Scored(NamedTuple):
    """Guesses that the target has scored."""

    block: JudgedBlock
    ids: Tensor  # [B, G], the guesses as the drafter gave them: any ids
    tops: Tensor  # [B, G+1], the target's largest logits: NaN and infinities show in them
    raw: dict[int, Tensor]  # [n, V], the target's own logits in rows that report them
    failed: dict[int, _DeadEnd]  # by row
    padding: int  # positions that were computed for no row


class _Verified(NamedTuple):
    """The verdict on a row's guesses, on the host."""

    x: list[int]  # the guesses
    n: int
    t: int
    beta: list[float]
    bias: list[float]  # [] where exact
    failed: RefusedError | None  # there is no token t


@torch.inference_mode()
def step(
    rows: list[Row],
    target: Scorer,
    drafter: Drafter,
    judge: Judge,
    gamma: list[int],
    reads: list[int] | None = None,
) -> Verdict:
    """Advance every row by 1 to gamma[b] + 1 tokens, each distributed as the target's own
    (paper, Algorithm 1), or as near to it as the judge says.

    reads: how many of its `Row.behind` tokens each row reads in this pass, all where left out. A
    row that keeps some for later is not advanced, and its gamma is 0; one row at least is.

    Each row that is advanced gets a StepRecord. On a device the host waits once, for the verdict,
    and where rows have controls for the guesses; the times then say when work was handed over. A
    row fails alone whose controls leave no token, or whose logits are invalid behind guesses that
    it keeps. Raises NumericsError for logits that are invalid at once and RefusedError for an
    invalid draft; the rows are then as they were.
    """
    times = [perf_counter()]
    draw = judge.draws(
        [row.request.key for row in rows],
        [len(row.tokens) for row in rows],
        [row.request.params for row in rows],
        [row.controls for row in rows],
    )
    if target.takes_tensors and not draw.greedy:
        draw.ahead(max(gamma), target.device)

    # Sample gamma guesses x_1, .., x_gamma from M_q autoregressively
    draft = drafter.propose(list(gamma), draw)
    counts = _counts(draft, gamma, target.vocab_size)
    times.append(perf_counter())

    # Run M_p in parallel: what it has not read, most often the last token, and the guesses behind
    reads = [row.behind for row in rows] if reads is None else reads
    guessed = _advanced(_Guessed([*range(len(rows))], rows, gamma, draft, counts, draw), reads)
    scored = _score(rows, reads, target, guessed)
    times.append(perf_counter())

    # Determine the number n of accepted guesses, and the token t that follows them
    verdict = judge(scored.block, guessed.draw)
    verified = _read(verdict, scored, guessed)

    # Return prefix + [x_1, .., x_n, t]
    with _whole(rows):
        kept = [_commit(row, v) for row, v in zip(guessed.rows, verified, strict=True)]
        _report(guessed.rows, scored, verdict, kept)
        _settle(rows, reads, guessed.places, kept, target, drafter)
        times.append(perf_counter())
        seconds = [after - before for before, after in pairwise(times)]
        for b, row in enumerate(guessed.rows):
            row.records.append(_record(guessed, b, verified[b], kept[b], seconds, scored.padding))
    return verdict


@contextmanager
def _whole(rows: list[Row]) -> Generator[None]:
    """What breaks off within, such as Ctrl-C in a user's own criterion, leaves no row's text ahead
    of what is reported of it."""
    before = [(len(row.tokens), len(row.records), len(row.logprobs)) for row in rows]
    try:
        yield
    except BaseException:
        for row, lengths in zip(rows, before, strict=True):
            row.take_back(*lengths)
        raise


def _counts(draft: Draft, gamma: list[int], V: int) -> list[int]:
    """How many guesses each row has; RefusedError for a draft of invalid types or shapes."""
    for name, value, axes in (("tokens", draft.tokens, 2), ("lengths", draft.lengths, 1)):
        dtype = getattr(value, "dtype", None)  # a drafter may be anybody's code
        if dtype not in (torch.int64, torch.int32) or value.ndim != axes:
            raise RefusedError(f"the drafter's {name} must be an integer tensor with {axes} axes")
    G = draft.tokens.shape[1]
    counts: list[int] = _list(draft.lengths)
    if not len(counts) == len(draft.tokens) == len(gamma) or any(
        not 0 <= a <= min(b, G) for a, b in zip(counts, gamma, strict=False)
    ):
        raise RefusedError(
            f"the drafter proposed {counts} guesses where at most {gamma} were asked"
        )
    shape = (len(gamma), G, V)
    if draft.q is not None and tuple(draft.q.shape) != shape:
        raise RefusedError(f"the drafter's q has shape {tuple(draft.q.shape)}; it must be {shape}")
    return counts


def _advanced(every: _Guessed, reads: list[int]) -> _Guessed:
    """Those whose text is read to its end in this pass."""
    behind = zip(every.rows, reads, strict=True)
    places = [b for b, (row, count) in enumerate(behind) if row.behind <= count]
    if len(places) == len(reads):
        return every
    draft, index = every.draft, torch.tensor(places)
    some = replace(
        draft,
        tokens=draft.tokens[index.to(draft.tokens.device)],
        lengths=draft.lengths[index],
        q=None if draft.q is None else draft.q[index.to(draft.q.device)],
        tops=None if draft.tops is None else draft.tops[index.to(draft.tops.device)],
    )
    rows = [every.rows[b] for b in places]
    gamma, counts = ([each[b] for b in places] for each in (every.gamma, every.counts))
    return _Guessed(places, rows, gamma, some, counts, every.draw.of(places))


def _score(rows: list[Row], reads: list[int], target: Scorer, guessed: _Guessed) -> _Scored:
    draft, counts = guessed.draft, guessed.counts
    G = max(counts)
    ids = sent(draft.tokens[:, :G], target.device).long()
    if min(counts) < G:  # a drafter's padding may be anything
        ids = torch.where(live(ids, sent(draft.lengths, target.device)), ids, 0)
    x = ids.clamp(0, target.vocab_size - 1)  # other ids are refused when they are read
    logits = _run(rows, reads, target, guessed, x)
    logits, tops, lengths = _judged(logits, guessed, G)
    raw = {b: logits[b].clone() for b, row in enumerate(guessed.rows) if row.reports}
    logits, failed = _shaped(logits, guessed.rows, x, counts)
    q = None if draft.q is None else sent(draft.q[:, :G], logits.device)
    return _Scored(JudgedBlock(logits, x, lengths, q), ids, tops, raw, failed, target.padding)


def _judged(logits: Tensor, guessed: _Guessed, G: int) -> tuple[Tensor, Tensor, Tensor]:
    """The logits, without what is invalid; the largest of each position, in which that shows before
    controls hide it; and how many guesses there are to judge.

    None is judged behind invalid logits. Which these are follows from the guesses up to there, so
    the law stays the target's: a text that gets there fails, as by plain decoding.
    """
    own, device = logits, logits.device
    logits, tops = mended(own)
    lengths = sent(torch.tensor(guessed.counts), device)
    parts = [tops] if guessed.draft.tops is None else [tops, guessed.draft.tops[:, :G]]
    if all(map(known_finite, parts)):
        return logits, tops, lengths
    mends = [bool(row.request.params.remove_invalid_values) for row in guessed.rows]
    skip = sent(torch.tensor(mends), device)  # rows whose controls see to it
    for part in parts:
        valid = torch.isfinite(sent(part, device)) | skip[:, None]
        lengths = torch.minimum(lengths, _leading(valid))
    return torch.where(skip[:, None, None], own, logits), tops, lengths


def _leading(valid: Tensor) -> Tensor:
    """How many positions stand before the first invalid one, `[B]`."""
    return valid.long().cumprod(1).sum(1)


def _run(rows: list[Row], reads: list[int], target: Scorer, guessed: _Guessed, x: Tensor) -> Tensor:
    """The target's logits at the last token and the guesses of the rows that are advanced,
    `[len(places), G+1, V]`."""
    need = [0] * len(rows)
    for b, count in zip(guessed.places, guessed.counts, strict=True):
        need[b] = 1 + count
    every = len(guessed.places) == len(rows)
    if target.takes_tensors and every and all(row.behind == 1 for row in rows):
        last = sent(torch.tensor([row.tokens[-1] for row in rows]), target.device)
        return target.score(torch.cat([last[:, None], x], 1), need)
    blocks = [row.unread[:count] for row, count in zip(rows, reads, strict=True)]
    for b, ids, count in zip(guessed.places, _list(x), guessed.counts, strict=True):
        blocks[b] += ids[:count]
    logits = target.score(blocks, need)
    return logits if every else logits[guessed.places]


def _settle(
    rows: list[Row],
    reads: list[int],
    places: list[int],
    kept: list[list[int]],
    target: Scorer,
    drafter: Drafter,
) -> None:
    """Target and drafter keep what the rows kept."""
    for row, count in zip(rows, reads, strict=True):
        row.behind -= count  # below 1 nowhere but in rows that are advanced
    gained: list[list[int]] = [[] for _ in rows]
    for b, tokens in zip(places, kept, strict=True):
        rows[b].behind, gained[b] = 1, list(tokens)
    target.set_lengths([len(row.tokens) - row.behind for row in rows])
    drafter.commit(gained)


def _shaped(
    logits: Tensor, rows: list[Row], x: Tensor, counts: list[int]
) -> tuple[Tensor, dict[int, _DeadEnd]]:
    """The logits of rows with controls as these leave them, each position by its own prefix.

    From where they leave nothing on the logits stay as they are: no text goes beyond, but numbers
    must be finite there.
    """
    failed: dict[int, _DeadEnd] = {}
    if all(row.controls is None for row in rows):
        return logits, failed
    logits = logits.to(working(logits.dtype))
    for b, (row, guesses) in enumerate(zip(rows, _list(x), strict=True)):
        if row.controls is None:
            continue
        for i in range(counts[b] + 1):
            try:
                logits[b, i] = row.controls.shape(logits[b, i], guesses[:i])
            except ControlError as error:
                failed[b] = _DeadEnd(i, error)
                break
    return logits, failed


def _read(verdict: Verdict, scored: _Scored, guessed: _Guessed) -> list[_Verified]:
    """The step's one read from the device; raises as `step` does."""
    draft, counts, draw = guessed.draft, guessed.counts, guessed.draw
    empty = verdict.beta[:, :0]
    n, lengths, t, betas, biases, ids, tops, draft_tops, *masses = read(
        verdict.n,
        scored.block.lengths,
        verdict.t,
        verdict.beta,
        empty if verdict.bias is None else verdict.bias,
        scored.ids,
        scored.tops,
        empty if draft.tops is None else draft.tops,
        *draw.masses,
    )
    V = scored.block.logits.shape[-1]
    for b, count in enumerate(counts):
        if count and not 0 <= min(ids[b][:count]) <= max(ids[b][:count]) < V:
            raise RefusedError(
                f"the drafter guessed {ids[b][:count]} for row {b}; ids must be in 0..{V - 1}"
            )
    failed = _invalid(tops, n, guessed)
    first = [int(not params.remove_invalid_values) for params in draw.params]
    require_finite(tops, "target", draw.lengths, first, guessed.places)
    # the draft's logits matter where the next guess would have been judged
    ends = [kept + (b not in failed) for b, kept in enumerate(n)]
    reached = [min(count, end) * on for count, end, on in zip(counts, ends, first, strict=True)]
    require_finite(draft_tops, "draft", draw.lengths, reached, guessed.places)
    require_mass(list(chain.from_iterable(masses)))
    x = [row[:count] for row, count in zip(ids, lengths, strict=True)]
    beta = [row[:count] for row, count in zip(betas, lengths, strict=True)]
    if any(map(math.isnan, chain.from_iterable(beta))):
        raise RefusedError(
            "the drafter's q holds NaN; it must be the law its guesses were drawn from"
        )
    verified = [_Verified(*row, None) for row in zip(x, n, t, beta, biases, strict=True)]
    for b, (place, error) in chain(failed.items(), scored.failed.items()):
        if place <= n[b]:  # guesses behind a dead end were judged by what is no law of the row's
            n[b] = place
            verified[b] = verified[b]._replace(n=place, failed=error)
    return verified


def _invalid(tops: list[list[float]], n: list[int], guessed: _Guessed) -> dict[int, _DeadEnd]:
    """The rows whose text gets to invalid logits by guesses."""
    failed: dict[int, _DeadEnd] = {}
    for b, kept in enumerate(n):
        mends = guessed.draw.params[b].remove_invalid_values
        if kept and not mends and not math.isfinite(tops[b][kept]):
            position = guessed.draw.lengths[b] + kept
            error = invalid(tops[b][kept], "target", position, guessed.places[b])
            failed[b] = _DeadEnd(kept, error)
    return failed


def _commit(row: Row, verified: _Verified) -> list[int]:
    """The tokens that a row keeps; without a law for the next one it fails behind them."""
    guesses = verified.x[: verified.n]
    if verified.failed is None:
        return row.commit([*guesses, verified.t])
    kept = row.commit(guesses)
    if row.finish_reason is None:
        row.fail(verified.failed)
    return kept


def _report(rows: list[Row], scored: _Scored, verdict: Verdict, kept: list[list[int]]) -> None:
    """Logits and logprobs of the tokens kept, in rows that ask for them."""
    for b, raw in scored.raw.items():
        row, n = rows[b], len(kept[b])
        if row.seen is not None:
            row.seen.append(Seen(raw[:n], scored.block.logits[b, :n].clone()))
        if row.request.params.logprobs is None:
            continue
        if row.request.params.logprobs_of == "raw":
            scores = raw[:n].to(working(raw.dtype)).log_softmax(-1)
        elif verdict.p is None:
            scores = law(scored.block.logits[b, :n], row.request.params).log()
        else:
            scores = verdict.p[b, :n].log()
        row.logprobs += logprobs(scores, kept[b], row.request.params.logprobs or 0)


def _record(
    guessed: _Guessed,
    b: int,
    verified: _Verified,
    kept: list[int],
    seconds: list[float],
    padding: int,
) -> StepRecord:
    judged = min(verified.n + 1, len(verified.x), len(kept))
    predicted = guessed.places[b] in guessed.draft.predicted
    calls = 0 if predicted else guessed.draft.calls
    return StepRecord(
        gamma=guessed.gamma[b],
        guesses=tuple(verified.x),
        accepted=min(verified.n, len(kept)),
        kept=tuple(kept),
        overlaps=tuple(verified.beta[:judged]),
        draft_calls=min(calls, guessed.counts[b]),  # those this row took part in
        draft_seconds=seconds[0],
        score_seconds=seconds[1],
        verify_seconds=seconds[2],
        rows=len(guessed.rows),
        biases=tuple(verified.bias[:judged]),
        padding=padding,
        predicted=predicted,
    )


def _list(tensor: Tensor) -> list[Any]:
    return cast(list[Any], tensor.tolist())
