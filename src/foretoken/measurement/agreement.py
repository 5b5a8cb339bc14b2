"""Agreement of a drafter with the target on the target's own text: beta at every position.

The text is replayed to both: the target scores it in a few passes; the drafter makes one draft
token at every position and then commits the text's token, as after a rejection. Serves every
drafter.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.controls.chain import Chain, chain
from foretoken.drafters.base import Draft, Drafter, parts_of
from foretoken.lease import leased
from foretoken.models.base import Model
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams, check, probabilities, require_finite
from foretoken.sampling.draw import Draw
from foretoken.sampling.verify import overlap

# positions in a pass of the target: distributions of a whole text would take much memory
CHUNK = 32


class ScoredPlace(NamedTuple):
    """One position of a replayed text."""

    p: Tensor  # [V]
    q: Tensor | None  # [V]; None: all of it on the draft token
    guess: int | None  # None: the drafter makes none


def overlaps(
    target: Model, drafter: Drafter, request: Request, new: list[int], params: SamplingParams
) -> list[float | None]:
    """sum min(p, q) at every token of `new`, which continues the request (Corollary 3.6, C57).

    None where the drafter makes no draft token: nothing is kept there, so count it as 0.
    RefusedError where one of them is in use.
    """
    return [_beta(place) for place in replayed(target, drafter, request, new, params, params)]


@torch.inference_mode()
def replayed(
    target: Model,
    drafter: Drafter,
    request: Request,
    new: list[int],
    params: SamplingParams,
    drafted: SamplingParams,
) -> Iterator[ScoredPlace]:
    """Both distributions at every token of `new`: the target's by `params`, the drafter's by
    `drafted`. RefusedError where one of them is in use."""
    sources = [request.source] if request.source is not None else None
    controls = chain(request, target.vocab_size)
    # A drafter that reads the target's states, or shares its rows, needs a pass for each token
    reads = any(part.reads_target for part in parts_of(drafter))
    size = 1 if reads else CHUNK
    p = torch.empty(0)
    with leased(target, drafter) as lease:
        lease.expect(1)
        target.start([request.prompt[:-1]], sources)
        drafter.start([0], [list(request.prompt)], sources and [list(s) for s in sources])
        for i, token in enumerate(new):
            draw = Draw([request.key], [len(request.prompt) + i], [drafted], [controls])
            draft = drafter.propose([1], draw)
            if i % size == 0:  # as in a step the draft token comes before the pass
                p = _distributions(target, request, controls, new[: i + size], i, params)
            yield _place(p[i % size], draft, draw)
            drafter.commit([[token]])
            if controls is not None:
                controls.commit([token])


def _distributions(
    target: Model,
    request: Request,
    controls: Chain | None,
    new: list[int],
    at: int,
    params: SamplingParams,
) -> Tensor:
    """p at the positions of `new` from `at` on, one pass: `[n, V]`."""
    block = [request.prompt[-1], *new][at : len(new)]
    logits = target.score([block], [len(block)])
    check(logits, "target", [len(request.prompt) + at], [len(block)])
    if controls is not None:
        shaped = [controls.shape(row, new[at : at + i]) for i, row in enumerate(logits[0])]
        logits = torch.stack(shaped)[None]
    return probabilities(logits[0], params)


def _place(p: Tensor, draft: Draft, draw: Draw) -> ScoredPlace:
    """p `[V]` beside the distribution of one draft token."""
    if draft.tops is not None:
        require_finite(draft.tops.tolist(), "draft", draw.lengths, [1])
    if not int(draft.lengths[0]):
        return ScoredPlace(p, None, None)
    q = None if draft.q is None else draft.q[0, 0].to(p.device)
    return ScoredPlace(p, q, int(draft.tokens[0, 0]))


def _beta(place: ScoredPlace) -> float | None:
    if place.guess is None:
        return None
    q = None if place.q is None else place.q[None, None]
    return float(
        overlap(place.p[None, None], q, torch.tensor([[place.guess]], device=place.p.device))
    )
