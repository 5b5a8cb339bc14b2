"""Algorithm 1 on a ragged batch: draft, score, verify, commit.

Plain decoding is this step with gamma 0. Knows protocols only: any model, any drafter, any judge.
"""
# torch leaves the type of tolist() open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from collections.abc import Generator
from contextlib import contextmanager
from itertools import chain, pairwise
from time import perf_counter
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter
from foretoken.errors import ControlError, RefusedError
from foretoken.models.base import Blocks, Scorer
from foretoken.request import Row, Seen, StepRecord
from foretoken.sampling.distributions import law, require_finite, require_mass, working
from foretoken.sampling.draw import Draw
from foretoken.sampling.judge import Block, Judge, Verdict
from foretoken.sampling.logprobs import logprobs
from foretoken.sampling.verify import live
from foretoken.transfer import read, sent


class _DeadEnd(NamedTuple):
    """A row's first position where its controls leave no law."""

    place: int
    error: ControlError


class _Scored(NamedTuple):
    """Guesses that the target has scored."""

    block: Block
    ids: Tensor  # [B, G], the guesses as the drafter gave them: any ids
    tops: Tensor  # [B, G+1], the target's largest logits: NaN and infinities show in them
    raw: dict[int, Tensor]  # [n, V], the target's own logits in rows that report them
    failed: dict[int, _DeadEnd]  # by row


class _Verified(NamedTuple):
    """The verdict on a row's guesses, on the host."""

    x: list[int]  # the guesses
    n: int
    t: int
    beta: list[float]
    bias: list[float]  # [] where exact
    failed: ControlError | None  # there is no token t


@torch.inference_mode()
def step(
    rows: list[Row],
    target: Scorer,
    drafter: Drafter,
    judge: Judge,
    gamma: list[int],
) -> Verdict:
    """Advance every row by 1 to gamma[b] + 1 tokens, each distributed as the target's own
    (paper, Algorithm 1), or as near to it as the judge says.

    Each row gets a StepRecord. On a device the host waits once, for the verdict, and where rows
    have controls for the guesses; the times then say when work was handed over. A row whose
    controls leave no token fails alone. Raises NumericsError for invalid logits and RefusedError
    for an invalid draft; the rows are then as they were.
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

    # Run M_p in parallel: the last token, not yet in the cache, and the guesses behind it
    scored = _score(rows, target, draft, counts)
    times.append(perf_counter())

    # Determine the number n of accepted guesses, and the token t that follows them
    verdict = judge(scored.block, draw)
    verified = _read(verdict, scored, draft, counts, draw)

    # Return prefix + [x_1, .., x_n, t]
    with _whole(rows):
        kept = [_commit(row, v) for row, v in zip(rows, verified, strict=True)]
        _report(rows, scored, verdict, kept)
        target.set_lengths([len(row.tokens) - 1 for row in rows])
        drafter.commit([list(tokens) for tokens in kept])
        times.append(perf_counter())
        seconds = [after - before for before, after in pairwise(times)]
        for b, row in enumerate(rows):
            calls = min(draft.calls, counts[b])  # those this row took part in
            row.records.append(_record(gamma[b], verified[b], kept[b], calls, seconds, len(rows)))
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


def _score(rows: list[Row], target: Scorer, draft: Draft, counts: list[int]) -> _Scored:
    G = max(counts)
    ids = sent(draft.tokens[:, :G], target.device).long()
    if min(counts) < G:  # a drafter's padding may be anything
        ids = torch.where(live(ids, sent(draft.lengths, target.device)), ids, 0)
    x = ids.clamp(0, target.vocab_size - 1)  # other ids are refused when they are read
    logits = target.score(_blocks(rows, x, counts, target), [1 + count for count in counts])
    tops = logits.amax(-1)  # before controls hide what is invalid
    raw = {b: logits[b].clone() for b, row in enumerate(rows) if row.reports}
    logits, failed = _shaped(logits, rows, x, counts)
    q = None if draft.q is None else sent(draft.q[:, :G], logits.device)
    lengths = sent(torch.tensor(counts), logits.device)
    return _Scored(Block(logits, x, lengths, q), ids, tops, raw, failed)


def _blocks(rows: list[Row], x: Tensor, counts: list[int], target: Scorer) -> Blocks:
    last = [row.tokens[-1] for row in rows]
    if target.takes_tensors:
        return torch.cat([sent(torch.tensor(last), target.device)[:, None], x], 1)
    ids: list[list[int]] = _list(x)
    return [[token, *row[:n]] for token, row, n in zip(last, ids, counts, strict=True)]


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


def _read(
    verdict: Verdict, scored: _Scored, draft: Draft, counts: list[int], draw: Draw
) -> list[_Verified]:
    """The step's one read from the device; raises as `step` does."""
    empty = verdict.beta[:, :0]
    n, t, betas, biases, ids, tops, draft_tops, *masses = read(
        verdict.n,
        verdict.t,
        verdict.beta,
        empty if verdict.bias is None else verdict.bias,
        scored.ids,
        scored.tops,
        empty if draft.tops is None else draft.tops,
        *draw.masses,
    )
    mended = [bool(params.remove_invalid_values) for params in draw.params]
    checked = [0 if skip else 1 + count for count, skip in zip(counts, mended, strict=True)]
    require_finite(tops, "target", draw.lengths, checked)
    require_finite(draft_tops, "draft", draw.lengths, [max(0, count - 1) for count in checked])
    require_mass(list(chain.from_iterable(masses)))
    x = [row[:count] for row, count in zip(ids, counts, strict=True)]
    V = scored.block.logits.shape[-1]
    for b, guesses in enumerate(x):
        if guesses and not 0 <= min(guesses) <= max(guesses) < V:
            raise RefusedError(
                f"the drafter guessed {guesses} for row {b}; ids must be in 0..{V - 1}"
            )
    beta = [row[:count] for row, count in zip(betas, counts, strict=True)]
    if any(map(math.isnan, chain.from_iterable(beta))):
        raise RefusedError(
            "the drafter's q holds NaN; it must be the law its guesses were drawn from"
        )
    verified = [_Verified(*row, None) for row in zip(x, n, t, beta, biases, strict=True)]
    for b, (place, error) in scored.failed.items():
        if place <= n[b]:  # guesses behind a dead end were judged by what is no law of the row's
            verified[b] = verified[b]._replace(n=place, failed=error)
    return verified


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
            known = raw[:n].to(working(raw.dtype)).log_softmax(-1)
        elif verdict.p is None:
            known = law(scored.block.logits[b, :n], row.request.params).log()
        else:
            known = verdict.p[b, :n].log()
        row.logprobs += logprobs(known, kept[b], row.request.params.logprobs or 0)


def _record(
    gamma: int, verified: _Verified, kept: list[int], calls: int, seconds: list[float], rows: int
) -> StepRecord:
    judged = min(verified.n + 1, len(verified.x), len(kept))
    return StepRecord(
        gamma=gamma,
        guesses=tuple(verified.x),
        accepted=min(verified.n, len(kept)),
        kept=tuple(kept),
        overlaps=tuple(verified.beta[:judged]),
        draft_calls=calls,
        draft_seconds=seconds[0],
        score_seconds=seconds[1],
        verify_seconds=seconds[2],
        rows=rows,
        biases=tuple(verified.bias[:judged]),
    )


def _list(tensor: Tensor) -> list[Any]:
    return cast(list[Any], tensor.tolist())
