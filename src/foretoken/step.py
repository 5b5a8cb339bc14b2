"""Algorithm 1 on a ragged batch: draft, score, verify, commit.

Plain decoding is this step with gamma 0. Sees protocols only: any model, any drafter, any rule.
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

from foretoken.distributions import SamplingParams, check, law, likeliest
from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.draw import Draw
from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.request import Row, StepRecord
from foretoken.verify import Rule, greedy, overlap, overlap_greedy


@torch.inference_mode()
def step(
    rows: list[Row],
    target: Model,
    drafter: Drafter,
    rule: Rule,
    params: SamplingParams,
    gamma: list[int],
) -> None:
    """Advance every row by 1 to gamma[b] + 1 tokens, each distributed as the target's own
    (paper, Algorithm 1).

    Each row gets a StepRecord. Raises NumericsError where the target's logits are none; the rows
    are then as they were.
    """
    times = [perf_counter()]
    lengths = [len(row.tokens) for row in rows]
    draw = Draw([row.request.key for row in rows], lengths, params)

    # Sample gamma guesses x_1, .., x_gamma from M_q autoregressively
    draft = drafter.propose(list(gamma), draw)
    guesses = _guesses(draft, gamma, target.vocab_size)
    times.append(perf_counter())

    # Run M_p in parallel: the last token, not yet in the cache, and the guesses behind it
    blocks = [[row.tokens[-1], *x] for row, x in zip(rows, guesses, strict=True)]
    need = [len(block) for block in blocks]
    logits = target.score(blocks, need)
    check(logits, "target", lengths, need)
    _force(logits, rows)
    times.append(perf_counter())

    # Determine the number n of accepted guesses, and the token t that follows them
    n, t, beta = _verify(logits, guesses, draft.q, rule, params, draw)

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
        )
        row.records.append(record)


def _verify(
    logits: Tensor,
    guesses: list[list[int]],
    q: Tensor | None,
    rule: Rule,
    params: SamplingParams,
    draw: Draw,
) -> tuple[list[int], list[int], list[list[float]]]:
    """n and t of every row, and beta at every guess; at temperature 0 without a softmax."""
    draft = pack(guesses)  # without what the drafter padded with
    x, lengths = draft.tokens.to(logits.device), draft.lengths.to(logits.device)
    q = None if q is None else q[:, : x.shape[1]].to(logits.device)
    if params.greedy:
        best = likeliest(logits)  # [B, G+1]
        n = greedy(best, x, lengths)
        t = best.gather(1, n[:, None]).squeeze(1)
        beta = overlap_greedy(best, q, x)
    else:
        p = law(logits, params)  # [B, G+1, V]
        outcome = rule(p, q, x, lengths)
        n = draw.kept(outcome)
        t = draw.next_token(outcome.next_law(n))
        beta = overlap(p, q, x)
    # One read, for a device makes its host wait at each; ids are exact in float64
    read = _list(torch.cat([n[:, None].double(), t[:, None].double(), beta], 1))
    betas = [row[2 : 2 + len(x)] for row, x in zip(read, guesses, strict=True)]
    if any(map(math.isnan, chain.from_iterable(betas))):
        raise RefusedError(
            "the drafter's q holds NaN; it must be the law its guesses were drawn from"
        )
    return [int(row[0]) for row in read], [int(row[1]) for row in read], betas


def _guesses(draft: Draft, gamma: list[int], V: int) -> list[list[int]]:
    """The draft as lists, after a look at what a drafter could get wrong."""
    for name, value, axes in (("tokens", draft.tokens, 2), ("lengths", draft.lengths, 1)):
        kind = getattr(value, "dtype", None)  # a drafter is anybody's code
        if kind not in (torch.int64, torch.int32) or value.ndim != axes:
            raise RefusedError(f"the drafter's {name} must be an integer tensor with {axes} axes")
    G = draft.tokens.shape[1]
    lengths: list[int] = _list(draft.lengths)
    if not len(lengths) == len(draft.tokens) == len(gamma) or any(
        not 0 <= a <= min(b, G) for a, b in zip(lengths, gamma, strict=False)
    ):
        raise RefusedError(
            f"the drafter proposed {lengths} guesses where at most {gamma} were asked"
        )
    shape = (len(gamma), G, V)
    if draft.q is not None and tuple(draft.q.shape) != shape:
        raise RefusedError(f"the drafter's q has shape {tuple(draft.q.shape)}; it must be {shape}")
    tokens: list[list[int]] = _list(draft.tokens)
    guesses = [x[:length] for x, length in zip(tokens, lengths, strict=True)]
    for b, x in enumerate(guesses):
        if x and not 0 <= min(x) <= max(x) < V:
            raise RefusedError(f"the drafter guessed {x} for row {b}; ids must be in 0..{V - 1}")
    return guesses


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
