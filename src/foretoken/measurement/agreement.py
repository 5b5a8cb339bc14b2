"""Measure how well a drafter agrees with its target on a given output: beta, the probability that a
draft token is accepted, at every position.

The output is replayed. The target scores it in a few forward passes; at every position the drafter
proposes one draft token and then commits the output's token, as after a rejection. This works with
every drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.controls.chain import Chain, build_chain
from foretoken.drafters.base import Draft, Drafter, list_parts
from foretoken.lease import hold_lease
from foretoken.models.base import Model
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import overlap
from foretoken.sampling.distributions import (
    SamplingParams,
    probabilities,
    require_finite,
    require_valid_logits,
)
from foretoken.sampling.draw import Draw

# The distributions of all positions of a long output would take too much memory
POSITIONS_PER_FORWARD = 32


class ScoredPosition(NamedTuple):
    """The distributions at one position of a replayed output."""

    p: Tensor  # [V], the target's
    q: Tensor | None  # [V], the drafter's; None: probability 1 for the draft token
    draft_token: int | None  # None: the drafter proposes no token


def compute_overlaps(
    target: Model, drafter: Drafter, request: Request, output: list[int], params: SamplingParams
) -> list[float | None]:
    """Return beta = sum min(p, q) at every token of `output`, which continues the request's prompt
    (Corollary 3.6, C57).

    beta is None at positions for which the drafter proposes no token; count it as 0, because
    nothing is accepted there. Raises RefusedError if the target or the drafter is in use.
    """
    return [
        _compute_beta(position)
        for position in replay_positions(target, drafter, request, output, params, params)
    ]


@torch.inference_mode()
def replay_positions(
    target: Model,
    drafter: Drafter,
    request: Request,
    output: list[int],
    params: SamplingParams,
    draft_params: SamplingParams,
) -> Iterator[ScoredPosition]:
    """Yield the target's and the drafter's distribution at every token of `output`, with the
    sampling params `params` and `draft_params`. Raises RefusedError if the target or the drafter is
    in use."""
    sources = [request.source] if request.source is not None else None
    controls = build_chain(request, target.vocab_size)
    # A drafter that uses the target's hidden states or cache needs a forward pass per token
    reads_target = any(part.reads_target for part in list_parts(drafter))
    size = 1 if reads_target else POSITIONS_PER_FORWARD
    p = torch.empty(0)
    with hold_lease(target, drafter) as lease:
        lease.count_joining(1)
        target.start([request.prompt[:-1]], sources)
        drafter.start([0], [list(request.prompt)], sources and [list(s) for s in sources])
        for i, token in enumerate(output):
            draw = Draw([request.key], [len(request.prompt) + i], [draft_params], [controls])
            draft = drafter.propose([1], draw)
            if i % size == 0:  # the drafter proposes before this forward pass, as in a step
                p = _compute_p(target, request, controls, output[: i + size], i, params)
            yield _make_position(p[i % size], draft, draw)
            drafter.commit([[token]])
            if controls is not None:
                controls.commit([token])


def _compute_p(
    target: Model,
    request: Request,
    controls: Chain | None,
    output: list[int],
    start: int,
    params: SamplingParams,
) -> Tensor:
    """Return p `[n, V]` at the positions of `output` from `start` on, computed by one forward
    pass."""
    block = [request.prompt[-1], *output][start : len(output)]
    logits = target.score([block], [len(block)])
    require_valid_logits(logits, "target", [len(request.prompt) + start], [len(block)])
    if controls is not None:
        shaped = [
            controls.shape(each, output[start : start + i]) for i, each in enumerate(logits[0])
        ]
        logits = torch.stack(shaped)[None]
    return probabilities(logits[0], params)


def _make_position(p: Tensor, draft: Draft, draw: Draw) -> ScoredPosition:
    """Combine the target's distribution p `[V]` with the drafter's proposal of one draft token."""
    if draft.tops is not None:
        require_finite(draft.tops.tolist(), "draft", draw.lengths, [1])
    if not int(draft.lengths[0]):
        return ScoredPosition(p, None, None)
    q = None if draft.q is None else draft.q[0, 0].to(p.device)
    return ScoredPosition(p, q, int(draft.tokens[0, 0]))


def _compute_beta(position: ScoredPosition) -> float | None:
    if position.draft_token is None:
        return None
    q = None if position.q is None else position.q[None, None]
    return float(
        overlap(
            position.p[None, None],
            q,
            torch.tensor([[position.draft_token]], device=position.p.device),
        )
    )
