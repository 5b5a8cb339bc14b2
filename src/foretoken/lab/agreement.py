"""How far a drafter agrees with the target on the target's own text: beta at every position.

The text is replayed to both: the target scores it in a few passes; the drafter makes one guess at
every position and then commits the text's token, as after a rejection. Serves every drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.claim import claimed
from foretoken.drafters.base import Drafter
from foretoken.models.base import Model
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams, check, law, one_hot, require_finite
from foretoken.sampling.draw import Draw
from foretoken.sampling.verify import overlap

CHUNK = 32  # positions in a pass of the target: laws of a whole text would take much memory


@torch.inference_mode()
def overlaps(
    target: Model, drafter: Drafter, request: Request, new: list[int], params: SamplingParams
) -> list[float | None]:
    """sum min(p, q) at every token of `new`, which continues the request (Corollary 3.6, C57).

    None where the drafter makes no guess: nothing is kept there, so count it as 0. RefusedError
    where one of them is in use.
    """
    sources = [request.source] if request.source is not None else None
    betas: list[float | None] = []
    # A drafter that reads the target's states needs those of the last token it commits
    size = 1 if getattr(drafter, "reads_target", False) else CHUNK
    with claimed(target, drafter) as claim:
        claim.expect(1)
        target.start([request.prompt[:-1]], sources)
        drafter.start([0], [list(request.prompt)], sources and [list(s) for s in sources])
        for at in range(0, len(new), size):
            p = _laws(target, request, new[: at + size], at, params)
            betas += [_overlap(p[i], drafter, request, new, at + i, params) for i in range(len(p))]
    return betas


def _laws(
    target: Model, request: Request, new: list[int], at: int, params: SamplingParams
) -> Tensor:
    """p at the positions of `new` from `at` on, one pass: `[n, V]`."""
    block = [request.prompt[-1], *new][at : len(new)]
    logits = target.score([block], [len(block)])
    check(logits, "target", [len(request.prompt) + at], [len(block)])
    p = law(logits[0], params)
    for place, token in request.forced.items():
        if at <= place < at + len(block):
            p[place - at] = one_hot(torch.tensor(token, device=p.device), p.shape[1]).to(p)
    return p


def _overlap(
    p: Tensor, drafter: Drafter, request: Request, new: list[int], at: int, params: SamplingParams
) -> float | None:
    """beta at one position: p `[V]` against the law of one guess."""
    draft = drafter.propose([1], Draw([request.key], [len(request.prompt) + at], params))
    drafter.commit([[new[at]]])
    if draft.tops is not None:
        require_finite(draft.tops.tolist(), "draft", [len(request.prompt) + at], [1])
    if not int(draft.lengths[0]):
        return None
    q = None if draft.q is None else draft.q[:, :1].to(p.device)
    return float(overlap(p[None, None], q, draft.tokens[:, :1].to(p.device)))
