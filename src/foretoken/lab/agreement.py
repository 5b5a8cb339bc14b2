"""How far a drafter agrees with the target on the target's own text: beta at every position.

The text is replayed to both: the target scores it in a few passes; the drafter makes one guess at
every position and then commits the text's token, as after a rejection. Serves every drafter.
"""

from __future__ import annotations

import torch
from torch import Tensor

from foretoken.claim import claimed
from foretoken.controls.chain import Chain, chain
from foretoken.drafters.base import Drafter
from foretoken.models.base import Model
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams, check, law, require_finite
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
    controls = chain(request, target.vocab_size)
    # A drafter that reads the target's states needs those of the last token it commits
    size = 1 if getattr(drafter, "reads_target", False) else CHUNK
    with claimed(target, drafter) as claim:
        claim.expect(1)
        target.start([request.prompt[:-1]], sources)
        drafter.start([0], [list(request.prompt)], sources and [list(s) for s in sources])
        for at in range(0, len(new), size):
            p = _laws(target, request, controls, new[: at + size], at, params)
            for i, law_there in enumerate(p, at):
                draw = Draw([request.key], [len(request.prompt) + i], [params], [controls])
                betas.append(_overlap(law_there, drafter, draw, new[i]))
                if controls is not None:
                    controls.commit([new[i]])
    return betas


def _laws(
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
    return law(logits[0], params)


def _overlap(p: Tensor, drafter: Drafter, draw: Draw, token: int) -> float | None:
    """beta at one position: p `[V]` against the law of one guess; the text goes on by `token`."""
    draft = drafter.propose([1], draw)
    drafter.commit([[token]])
    if draft.tops is not None:
        require_finite(draft.tops.tolist(), "draft", draw.lengths, [1])
    if not int(draft.lengths[0]):
        return None
    q = None if draft.q is None else draft.q[:, :1].to(p.device)
    return float(overlap(p[None, None], q, draft.tokens[:, :1].to(p.device)))
