"""Algorithm 1 on a ragged batch: draft, score, verify, commit.

Plain decoding is this step with gamma 0. Serves any model, any drafter, any
verifier.
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
from typing import NamedTuple, cast

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.errors import ControlError, RefusedError
from foretoken.models.base import Scorer
from foretoken.records import StepRecord
from foretoken.request import Row, Seen
from foretoken.sampling.distributions import (
    invalid,
    known_finite,
    mended,
    peaks,
    probabilities,
    require_finite,
    require_mass,
    working,
)
from foretoken.sampling.draw import Draw
from foretoken.sampling.logprobs import logprobs
from foretoken.sampling.verifier import ScoredBlock, Verification, Verifier, compares, draws
from foretoken.sampling.verify import live
from foretoken.transfer import listed, read, sent


class _DeadEnd(NamedTuple):
    """A row's first position without a distribution: its controls leave none, or its logits are
    invalid."""

    place: int
    error: RefusedError


class _Drafted(NamedTuple):
    """The rows that are advanced, and what was guessed for them."""

    indices: list[int]  # of the rows in the batch
    rows: list[Row]
    gamma: list[int]
    draft: Draft
    counts: list[int]  # guesses
    draw: Draw
    ids: list[list[int]] | None  # the guesses; None: they are on a device


class _Scored(NamedTuple):
    """Guesses that the target has scored, as tensors."""

    block: ScoredBlock
    ids: Tensor  # [B, G], the draft tokens as the drafter gave them: any ids
    tops: Tensor  # [B, G+1], the target's largest logits: NaN and infinities show in them
    raw: dict[int, Tensor]  # [n, V], the target's own logits in rows that report them
    failed: dict[int, _DeadEnd]  # by row


class _Verified(NamedTuple):
    """The verification on a row's draft tokens, on the host."""

    x: list[int]  # the draft tokens
    n: int
    t: int
    beta: list[float]
    bias: list[float]  # [] where exact
    failed: RefusedError | None = None  # there is no token t


class _Judged(NamedTuple):
    """The verifications of all rows, and what they follow from, for whoever asks for it."""

    rows: list[_Verified]
    scored: _Scored | None = None
    p: Tensor | None = None  # [B, G+1, V], the target's distributions


@torch.inference_mode()
def step(
    rows: list[Row],
    target: Scorer,
    drafter: Drafter,
    verifier: Verifier,
    gamma: list[int],
    reads: list[int] | None = None,
) -> Tensor | None:
    """Advance every row by 1 to gamma[b] + 1 tokens, each distributed as the target's own
    (paper, Algorithm 1), or as near to it as the verifier says.

    reads: how many of its `Row.pending` tokens each row reads in this pass, all where left out. A
    row that keeps some for later is not advanced, and its gamma is 0; one row at least is.

    Returns the target's distributions, `[B, G+1, V]`, of the rows that are advanced; None where
    only the likeliest tokens count. Each row that is advanced gets a StepRecord. On a device the
    host waits once, for the verification, and where rows have controls for the draft tokens; the
    times then say when work was handed over. A row fails alone whose controls leave no token, or
    whose logits are invalid behind draft tokens that it keeps. Raises NumericsError for logits that
    are invalid at once and RefusedError for an invalid draft; the rows are then as they were.
    """
    times = [perf_counter()]
    draw = verifier.draws(
        [row.request.key for row in rows],
        [len(row.tokens) for row in rows],
        [row.request.params for row in rows],
        [row.controls for row in rows],
    )
    if target.capabilities.tensors and not draw.greedy:
        draw.ahead(max(gamma), target.device)

    # Sample gamma draft tokens x_1, .., x_gamma from M_q autoregressively
    draft = drafter.propose(list(gamma), draw)
    counts = _counts(draft, gamma, target.vocab_size)
    ids = _ids(draft, counts, target.vocab_size)
    times.append(perf_counter())

    # Run M_p in parallel: what it has not read, most often the last token, and the draft tokens
    # behind
    reads = [row.pending for row in rows] if reads is None else reads
    drafted = _advanced(_Drafted([*range(len(rows))], rows, gamma, draft, counts, draw, ids), reads)
    logits = _run(rows, reads, target, drafted)
    times.append(perf_counter())

    # Determine the number n of accepted draft tokens, and the token t that follows them
    judged = _judged_here(logits, drafted, verifier) or _judged(logits, drafted, verifier)

    # Return prefix + [x_1, .., x_n, t]
    with _whole(rows):
        gained = [_commit(row, v) for row, v in zip(drafted.rows, judged.rows, strict=True)]
        _report(drafted.rows, judged, gained)
        _settle(rows, reads, drafted.indices, gained, target, drafter)
        times.append(perf_counter())
        seconds = [after - before for before, after in pairwise(times)]
        for b, row in enumerate(drafted.rows):
            record = _record(drafted, b, judged.rows[b], gained[b], seconds, target.padding)
            row.records.append(record)
    return judged.p


@contextmanager
def _whole(rows: list[Row]) -> Generator[None]:
    """Take back a step that breaks off, by Ctrl-C in a user's own criterion for example, so that no
    row's text is ahead of its records."""
    before = [(len(row.tokens), len(row.records), len(row.logprobs)) for row in rows]
    try:
        yield
    except BaseException:
        for row, lengths in zip(rows, before, strict=True):
            row.take_back(*lengths)
        raise


def _counts(draft: Draft, gamma: list[int], V: int) -> list[int]:
    """Return how many draft tokens each row has; RefusedError for a draft of invalid types or
    shapes."""
    for name, value, axes in (("tokens", draft.tokens, 2), ("lengths", draft.lengths, 1)):
        dtype = getattr(value, "dtype", None)  # a drafter may be anybody's code
        if dtype not in (torch.int64, torch.int32) or value.ndim != axes:
            raise RefusedError(f"the drafter's {name} must be an integer tensor with {axes} axes")
    G = draft.tokens.shape[1]
    counts: list[int] = listed(draft.lengths)
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


def _ids(draft: Draft, counts: list[int], V: int) -> list[list[int]] | None:
    """Return the draft tokens where they are on the host; RefusedError for ids that are none."""
    if not draft.tokens.is_cpu:
        return None
    ids = [row[:count] for row, count in zip(listed(draft.tokens), counts, strict=True)]
    _require_ids(ids, V)
    return ids


def _require_ids(ids: list[list[int]], V: int) -> None:
    for b, x in enumerate(ids):
        if x and not 0 <= min(x) <= max(x) < V:
            raise RefusedError(f"the drafter guessed {x} for row {b}; ids must be in 0..{V - 1}")


def _advanced(every: _Drafted, reads: list[int]) -> _Drafted:
    """Return the rows whose prefill ends in this forward, and their drafts."""
    pairs = zip(every.rows, reads, strict=True)
    indices = [b for b, (row, count) in enumerate(pairs) if row.pending <= count]
    if len(indices) == len(reads):
        return every
    draft, index = every.draft, torch.tensor(indices)
    some = replace(
        draft,
        tokens=draft.tokens[index.to(draft.tokens.device)],
        lengths=draft.lengths[index],
        q=None if draft.q is None else draft.q[index.to(draft.q.device)],
        tops=None if draft.tops is None else draft.tops[index.to(draft.tops.device)],
    )
    rows = [every.rows[b] for b in indices]
    gamma, counts = ([each[b] for b in indices] for each in (every.gamma, every.counts))
    ids = None if every.ids is None else [every.ids[b] for b in indices]
    return _Drafted(indices, rows, gamma, some, counts, every.draw.of(indices), ids)


def _run(rows: list[Row], reads: list[int], target: Scorer, drafted: _Drafted) -> Tensor:
    """The target's logits at the last token and the draft tokens of the rows that are advanced,
    `[len(places), G+1, V]`."""
    need = [0] * len(rows)
    for b, count in zip(drafted.indices, drafted.counts, strict=True):
        need[b] = 1 + count
    every = len(drafted.indices) == len(rows)
    if target.capabilities.tensors and every and all(row.pending == 1 for row in rows):
        last = sent(torch.tensor([row.tokens[-1] for row in rows]), target.device)
        x = _possible(drafted, target.vocab_size, target.device)
        return target.score(torch.cat([last[:, None], x], 1), need)
    ids = drafted.ids
    if ids is None:
        ids = listed(_possible(drafted, target.vocab_size, target.device))
    blocks = [row.unread[:count] for row, count in zip(rows, reads, strict=True)]
    for b, x, count in zip(drafted.indices, ids, drafted.counts, strict=True):
        blocks[b] += x[:count]
    logits = target.score(blocks, need)
    return logits if every else logits[drafted.indices]


def _possible(drafted: _Drafted, V: int, device: torch.device) -> Tensor:
    """The draft tokens `[B, G]` on a device, as ids of the target: others are refused when they are
    read."""
    ids, _ = _padded(drafted, device)
    return ids.clamp(0, V - 1)


def _padded(drafted: _Drafted, device: torch.device) -> tuple[Tensor, Tensor]:
    """The draft tokens `[B, G]` on a device, 0 in their padding, and how many each row has."""
    draft, counts = drafted.draft, drafted.counts
    whole = min(counts) == draft.tokens.shape[1] and draft.tokens.dtype == torch.int64
    if drafted.ids is not None and not whole:
        packed = pack(drafted.ids)
        return sent(packed.tokens, device), sent(packed.lengths, device)
    ids = sent(draft.tokens[:, : max(counts)], device).long()
    lengths = sent(draft.lengths, device)
    if min(counts) < max(counts):  # a drafter's padding may be anything
        ids = torch.where(live(ids, lengths), ids, 0)
    return ids, lengths


def _judged_here(logits: Tensor, drafted: _Drafted, verifier: Verifier) -> _Judged | None:
    """The verification where all of it is on the host and rows have no controls and no reports;
    None where more has to be looked at, and where logits or q are invalid: whether that matters
    depends on where the text gets to."""
    draft, draw, ids = drafted.draft, drafted.draw, drafted.ids
    if ids is None or not logits.is_cpu or draw.controlled:
        return None
    if any(row.reports for row in drafted.rows):
        return None
    if not (draft.tops is None or known_finite(draft.tops)):
        return None
    if draft.q is None and compares(verifier, draw):
        return _compared(logits, ids)
    if not draws(verifier, draw):
        return None
    x, lengths = _padded(drafted, logits.device)
    q = None if draft.q is None else draft.q[:, : x.shape[1]]
    before = len(draw.masses)
    verification = verifier(ScoredBlock(logits, x, lengths, q), draw)
    assert verification.p is not None
    heads = _lists(verification.p[..., 0])  # NaN where logits are invalid
    betas, masses = _lists(verification.beta), [x for each in draw.masses for x in _floats(each)]
    if not all(map(math.isfinite, chain(*heads, masses, *betas))):
        del draw.masses[before:]
        return None
    require_mass(masses)
    made = zip(ids, listed(verification.n), listed(verification.t), betas, strict=True)
    verified = [_Verified(x, n, t, beta[: len(x)], []) for x, n, t, beta in made]
    return _Judged(verified, p=verification.p)


def _lists(matrix: Tensor) -> list[list[float]]:
    return cast(list[list[float]], matrix.tolist())


def _floats(vector: Tensor) -> list[float]:
    return cast(list[float], vector.tolist())


def _compared(logits: Tensor, ids: list[list[int]]) -> _Judged | None:
    """The verification where each draft token is but compared with the most probable one."""
    best, tops = peaks(logits)
    if not all(map(math.isfinite, chain.from_iterable(tops))):
        return None
    verified: list[_Verified] = []
    for x, likeliest in zip(ids, best, strict=True):
        equal = [a == b for a, b in zip(x, likeliest, strict=False)]
        n = equal.index(False) if False in equal else len(x)
        verified.append(_Verified(x, n, likeliest[n], [*map(float, equal)], []))
    return _Judged(verified)


def _judged(logits: Tensor, drafted: _Drafted, verifier: Verifier) -> _Judged:
    """The verification by tensors, and one read; raises as `step` does."""
    scored = _scored(logits, drafted)
    verification = verifier(scored.block, drafted.draw)
    return _Judged(_read(verification, scored, drafted), scored, verification.p)


def _scored(logits: Tensor, drafted: _Drafted) -> _Scored:
    """The block that the verifier judges, and what has to be known of it."""
    ids, lengths = _padded(drafted, logits.device)
    # others are refused when they are read
    x = ids if drafted.ids is not None else ids.clamp(0, logits.shape[-1] - 1)
    logits, tops, lengths = _without_invalid(logits, drafted, lengths)
    raw = {b: logits[b].clone() for b, row in enumerate(drafted.rows) if row.reports}
    logits, failed = _shaped(logits, drafted.rows, x, drafted.counts)
    q = drafted.draft.q
    q = None if q is None else sent(q[:, : x.shape[1]], logits.device)
    return _Scored(ScoredBlock(logits, x, lengths, q), ids, tops, raw, failed)


def _without_invalid(
    logits: Tensor, drafted: _Drafted, lengths: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The logits, without what is invalid; the largest of each position, in which that shows before
    controls hide it; and how many of the draft tokens there are to judge.

    None is judged behind invalid logits. Which these are follows from the draft tokens up to there,
    so the distribution stays the target's: a text that gets there fails, as by plain decoding.
    """
    own, device = logits, logits.device
    logits, tops = mended(own)
    parts = [tops]
    if drafted.draft.tops is not None:
        parts.append(drafted.draft.tops[:, : tops.shape[1] - 1])
    if all(map(known_finite, parts)):
        return logits, tops, lengths
    mends = [bool(row.request.params.remove_invalid_values) for row in drafted.rows]
    skip = sent(torch.tensor(mends), device)  # rows whose controls see to it
    for part in parts:
        valid = torch.isfinite(sent(part, device)) | skip[:, None]
        lengths = torch.minimum(lengths, _leading(valid))
    return torch.where(skip[:, None, None], own, logits), tops, lengths


def _leading(valid: Tensor) -> Tensor:
    """Count the positions before the first invalid one, `[B]`."""
    return valid.long().cumprod(1).sum(1)


def _settle(
    rows: list[Row],
    reads: list[int],
    indices: list[int],
    gained: list[list[int]],
    target: Scorer,
    drafter: Drafter,
) -> None:
    """Keep in target and drafter what the rows gained."""
    for row, count in zip(rows, reads, strict=True):
        row.pending -= count  # below 1 nowhere but in rows that are advanced
    committed: list[list[int]] = [[] for _ in rows]
    for b, tokens in zip(indices, gained, strict=True):
        rows[b].pending, committed[b] = 1, list(tokens)
    target.set_lengths([len(row.tokens) - row.pending for row in rows])
    drafter.commit(committed)


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
    for b, (row, draft_tokens) in enumerate(zip(rows, listed(x), strict=True)):
        if row.controls is None:
            continue
        for i in range(counts[b] + 1):
            try:
                logits[b, i] = row.controls.shape(logits[b, i], draft_tokens[:i])
            except ControlError as error:
                failed[b] = _DeadEnd(i, error)
                break
    return logits, failed


def _read(verification: Verification, scored: _Scored, drafted: _Drafted) -> list[_Verified]:
    """The step's one read from the device; raises as `step` does."""
    draft, counts, draw = drafted.draft, drafted.counts, drafted.draw
    empty = verification.beta[:, :0]
    n, lengths, t, betas, biases, ids, tops, draft_tops, *masses = read(
        verification.n,
        scored.block.lengths,
        verification.t,
        verification.beta,
        empty if verification.bias is None else verification.bias,
        scored.ids,
        scored.tops,
        empty if draft.tops is None else draft.tops,
        *draw.masses,
    )
    V = scored.block.logits.shape[-1]
    _require_ids([x[:count] for x, count in zip(ids, counts, strict=True)], V)
    failed = _invalid(tops, n, drafted)
    first = [int(not params.remove_invalid_values) for params in draw.params]
    require_finite(tops, "target", draw.lengths, first, drafted.indices)
    # the draft's logits matter where the next draft token would have been judged
    ends = [accepted + (b not in failed) for b, accepted in enumerate(n)]
    reached = [min(count, end) * on for count, end, on in zip(counts, ends, first, strict=True)]
    require_finite(draft_tops, "draft", draw.lengths, reached, drafted.indices)
    require_mass(list(chain.from_iterable(masses)))
    x = [row[:count] for row, count in zip(ids, lengths, strict=True)]
    beta = [row[:count] for row, count in zip(betas, lengths, strict=True)]
    if any(map(math.isnan, chain.from_iterable(beta))):
        raise RefusedError(
            "the drafter's q holds NaN; it must be the law its guesses were drawn from"
        )
    verified = [_Verified(*row) for row in zip(x, n, t, beta, biases, strict=True)]
    for b, (place, error) in chain(failed.items(), scored.failed.items()):
        # draft tokens behind a dead end were judged by what is no distribution of the row's
        if place <= n[b]:
            n[b] = place
            verified[b] = verified[b]._replace(n=place, failed=error)
    return verified


def _invalid(tops: list[list[float]], n: list[int], drafted: _Drafted) -> dict[int, _DeadEnd]:
    """The rows whose text gets to invalid logits by draft tokens."""
    failed: dict[int, _DeadEnd] = {}
    for b, accepted in enumerate(n):
        mends = drafted.draw.params[b].remove_invalid_values
        if accepted and not mends and not math.isfinite(tops[b][accepted]):
            position = drafted.draw.lengths[b] + accepted
            error = invalid(tops[b][accepted], "target", position, drafted.indices[b])
            failed[b] = _DeadEnd(accepted, error)
    return failed


def _commit(row: Row, verified: _Verified) -> list[int]:
    """Append what a row gains; without a distribution for the next one it fails behind them."""
    draft_tokens = verified.x[: verified.n]
    if verified.failed is None:
        return row.commit([*draft_tokens, verified.t])
    gained = row.commit(draft_tokens)
    if row.finish_reason is None:
        row.fail(verified.failed)
    return gained


def _report(rows: list[Row], judged: _Judged, gained: list[list[int]]) -> None:
    """Record logits and logprobs of the tokens gained, in rows that ask for them."""
    if judged.scored is None:
        return
    logits = judged.scored.block.logits
    for b, raw in judged.scored.raw.items():
        row, n = rows[b], len(gained[b])
        if row.seen is not None:
            row.seen.append(Seen(raw[:n], logits[b, :n].clone()))
        if row.request.params.logprobs is None:
            continue
        if row.request.params.logprobs_of == "raw":
            scores = raw[:n].to(working(raw.dtype)).log_softmax(-1)
        elif judged.p is None:
            scores = probabilities(logits[b, :n], row.request.params).log()
        else:
            scores = judged.p[b, :n].log()
        row.logprobs += logprobs(scores, gained[b], row.request.params.logprobs or 0)


def _record(
    drafted: _Drafted,
    b: int,
    verified: _Verified,
    gained: list[int],
    seconds: list[float],
    padding: int,
) -> StepRecord:
    judged = min(verified.n + 1, len(verified.x), len(gained))
    predicted = drafted.indices[b] in drafted.draft.predicted
    calls = 0 if predicted else drafted.draft.calls
    return StepRecord(
        gamma=drafted.gamma[b],
        guesses=tuple(verified.x),
        accepted=min(verified.n, len(gained)),
        kept=tuple(gained),
        overlaps=tuple(verified.beta[:judged]),
        draft_calls=min(calls, drafted.counts[b]),  # those this row took part in
        draft_seconds=seconds[0],
        score_seconds=seconds[1],
        verify_seconds=seconds[2],
        rows=len(drafted.rows),
        biases=tuple(verified.bias[:judged]),
        padding=padding,
        predicted=predicted,
        grade=drafted.rows[b].grade,
    )
