"""Algorithm 1 on a ragged batch: draft, score, verify, commit.

Plain decoding is this step with gamma 0. Sees protocols only: any model, any drafter, any judge.
"""
# torch leaves the type of tolist() open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

import math
from itertools import chain
from time import perf_counter
from typing import Any, cast

import torch
from torch import Tensor

from foretoken.drafters.base import Draft, Drafter
from foretoken.errors import RefusedError
from foretoken.models.base import Blocks, Model
from foretoken.request import Row, StepRecord
from foretoken.sampling.distributions import SamplingParams, require_finite, require_mass
from foretoken.sampling.judge import Judge
from foretoken.sampling.verify import live
from foretoken.transfer import read, sent


@torch.inference_mode()
def step(
    rows: list[Row],
    target: Model,
    drafter: Drafter,
    judge: Judge,
    params: SamplingParams,
    gamma: list[int],
) -> None:
    """Advance every row by 1 to gamma[b] + 1 tokens, each distributed as the target's own
    (paper, Algorithm 1), or as near to it as the judge says.

    Each row gets a StepRecord. On a device the host waits once, for n and what comes with it; its
    times then say when work was handed over. Raises NumericsError where logits are none, and
    RefusedError for a draft that is none; the rows are then as they were.
    """
    times = [perf_counter()]
    lengths = [len(row.tokens) for row in rows]
    draw = judge.draws([row.request.key for row in rows], lengths, params)
    if target.takes_tensors and not params.greedy:
        draw.ahead(max(gamma), target.device)

    # Sample gamma guesses x_1, .., x_gamma from M_q autoregressively
    draft = drafter.propose(list(gamma), draw)
    counts = _counts(draft, gamma, target.vocab_size)
    said, x = _guesses(draft, counts, target)
    times.append(perf_counter())

    # Run M_p in parallel: the last token, not yet in the cache, and the guesses behind it
    need = [1 + count for count in counts]
    logits = target.score(_blocks(rows, x, counts, target), need)
    tops = logits.amax(-1)
    _force(logits, rows)
    times.append(perf_counter())

    # Determine the number n of accepted guesses, and the token t that follows them
    here = sent(torch.tensor(counts), logits.device)
    q = None if draft.q is None else sent(draft.q[:, : x.shape[1]], logits.device)
    n, t, beta, bias = judge(logits, x, here, q, params, draw)
    nothing = beta[:, :0]  # what is not there has no columns
    bias = nothing if bias is None else bias
    doubts = nothing if draft.tops is None else draft.tops
    n, t, beta, bias, said, *numbers = read(n, t, beta, bias, said, tops, doubts, *draw.masses)
    _require_laws(numbers, lengths, counts)
    guesses, beta = _judged(said, beta, counts, target.vocab_size)

    # Return prefix + [x_1, .., x_n, t]
    kept = [row.commit([*guesses[b][: n[b]], t[b]]) for b, row in enumerate(rows)]
    target.set_lengths([len(row.tokens) - 1 for row in rows])
    drafter.commit([list(tokens) for tokens in kept])
    times.append(perf_counter())

    for b, row in enumerate(rows):
        judged = min(n[b] + 1, len(guesses[b]), len(kept[b]))
        record = StepRecord(
            gamma=gamma[b],
            guesses=tuple(guesses[b]),
            accepted=min(n[b], len(kept[b])),
            kept=tuple(kept[b]),
            overlaps=tuple(beta[b][:judged]),
            draft_calls=min(draft.calls, len(guesses[b])),  # those this row took part in
            draft_seconds=times[1] - times[0],
            score_seconds=times[2] - times[1],
            verify_seconds=times[3] - times[2],
            rows=len(rows),
            biases=tuple(bias[b][:judged]),
        )
        row.records.append(record)


def _counts(draft: Draft, gamma: list[int], V: int) -> list[int]:
    """How many guesses each row has, after a look at the shapes that a drafter could get wrong."""
    for name, value, axes in (("tokens", draft.tokens, 2), ("lengths", draft.lengths, 1)):
        kind = getattr(value, "dtype", None)  # a drafter is anybody's code
        if kind not in (torch.int64, torch.int32) or value.ndim != axes:
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


def _guesses(draft: Draft, counts: list[int], target: Model) -> tuple[Tensor, Tensor]:
    """The guesses `[B, max(counts)]`, as the drafter gave them and as ids that the target has: on
    its device, and without what the drafter padded with."""
    most = max(counts)
    said = sent(draft.tokens[:, :most], target.device).long()
    if min(counts) < most:
        said = torch.where(live(said, sent(draft.lengths, target.device)), said, 0)
    return said, said.clamp(0, target.vocab_size - 1)


def _blocks(rows: list[Row], x: Tensor, counts: list[int], target: Model) -> Blocks:
    last = [row.tokens[-1] for row in rows]
    if target.takes_tensors:
        return torch.cat([sent(torch.tensor(last), target.device)[:, None], x], 1)
    ids: list[list[int]] = _list(x)
    return [[token, *row[:n]] for token, row, n in zip(last, ids, counts, strict=True)]


def _require_laws(numbers: list[list[Any]], lengths: list[int], counts: list[int]) -> None:
    tops, doubts, *masses = numbers
    require_finite(tops, "target", lengths, [1 + count for count in counts])
    require_finite(doubts, "draft", lengths, counts)
    require_mass(list(chain.from_iterable(masses)))


def _judged(
    said: list[list[int]], beta: list[list[float]], counts: list[int], V: int
) -> tuple[list[list[int]], list[list[float]]]:
    """The guesses and their betas, after a look at the numbers that a drafter could get wrong."""
    guesses = [x[:count] for x, count in zip(said, counts, strict=True)]
    for b, x in enumerate(guesses):
        if x and not 0 <= min(x) <= max(x) < V:
            raise RefusedError(f"the drafter guessed {x} for row {b}; ids must be in 0..{V - 1}")
    betas = [row[:count] for row, count in zip(beta, counts, strict=True)]
    if any(map(math.isnan, chain.from_iterable(betas))):
        raise RefusedError(
            "the drafter's q holds NaN; it must be the law its guesses were drawn from"
        )
    return guesses, betas


def _force(logits: Tensor, rows: list[Row]) -> None:
    """Where a token is forced (first, or last before the limit) it gets all the mass; in place."""
    for b, row in enumerate(rows):
        done = len(row.tokens) - len(row.request.prompt)
        for place, token in row.request.forced.items():
            if 0 <= place - done < logits.shape[1]:
                logits[b, place - done] = -torch.inf
                logits[b, place - done, token] = 0.0


def _list(tensor: Tensor) -> list[Any]:
    return cast(list[Any], tensor.tolist())
