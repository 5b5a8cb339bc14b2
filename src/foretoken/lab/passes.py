"""v(n): seconds of the target's pass over n new tokens of one row, timed as the step times it.

Knows the Model protocol only.
"""

from __future__ import annotations

from time import perf_counter

import torch

from foretoken.distributions import check
from foretoken.models.base import Model
from foretoken.request import Request


@torch.inference_mode()
def passes(
    target: Model, request: Request, text: list[int], most: int, repeats: int = 1
) -> tuple[list[list[float]], int]:
    """`repeats` seconds of a pass over 1, 2, .., `most` tokens, and the tokens it is behind.

    `text`: prompt and new tokens of the request, of which half the new ones are behind. Fewer
    where they would not fit in the target's context. The target must be idle; it is left so.
    """
    context = (len(text) + len(request.prompt)) // 2
    if target.context is not None:
        context = min(context, max(0, target.context - most))
        most = min(most, target.context - context)
    ahead = (text[context:] or text) * most  # what is read; of any text
    times: list[list[float]] = [[] for _ in range(most)]
    target.start([text[:context]], None if request.source is None else [request.source])
    try:
        for n in [*range(1, most + 1)] * repeats:
            # As in generation, a pass of this size came just before: a change of shape is slow
            before = max(0, context - n)
            target.set_lengths([before])
            if before < context:
                _pass(target, text[before:context], before)
            times[n - 1].append(_pass(target, ahead[:n], context))
    finally:
        target.leave([0])
    return times, context


def _pass(target: Model, block: list[int], context: int) -> float:
    began = perf_counter()
    logits = target.score([block], [len(block)])
    check(logits, "target", [context], [len(block)])  # reads the logits, so they are there
    return perf_counter() - began
