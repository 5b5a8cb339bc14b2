"""v(n): seconds of the target's pass over n new tokens of one row, timed as the step times it: on
the engine's threads, behind passes of the same size.

Knows the Model protocol only.
"""

from __future__ import annotations

from time import perf_counter

import torch

from foretoken.engine.batch import threads
from foretoken.lease import leased
from foretoken.models.base import Model
from foretoken.request import Request
from foretoken.sampling.distributions import check

# Untimed passes ahead of the timed ones, which are then in the steady state of generation. A
# runtime may lay out its work anew for another size, or for a while pad a smaller one to the last:
# the first size follows a pass of any size, the others follow a smaller one.
FIRST, SETTLE = 20, 2


@torch.inference_mode()
def passes(
    target: Model, request: Request, text: list[int], most: int, repeats: int = 1
) -> tuple[list[list[float]], int]:
    """`repeats` seconds of a pass over 1, 2, .., `most` tokens, and the tokens it is behind.

    `text`: prompt and new tokens of the request; the passes are behind half of the new ones, or
    fewer where the target's context is too small. RefusedError where the target is in use.
    """
    context = (len(text) + len(request.prompt)) // 2
    if target.context is not None:
        context = min(context, max(0, target.context - most))
        most = min(most, target.context - context)
    ahead = (text[context:] or text) * most  # the tokens read; any will do
    times: list[list[float]] = []
    with leased(target), threads(target):
        target.start([text[:context]], None if request.source is None else [request.source])
        for n in range(1, most + 1):
            settle = FIRST if n == 1 else SETTLE
            seconds = [_pass(target, ahead[:n], context) for _ in range(settle + repeats)]
            times.append(seconds[settle:])
    return times, context


def _pass(target: Model, block: list[int], context: int) -> float:
    """Seconds of one pass behind `context` tokens, rolled back."""
    start = perf_counter()
    logits = target.score([block], [len(block)])
    check(logits, "target", [context], [len(block)])  # reads the logits, so waits for them
    seconds = perf_counter() - start
    target.set_lengths([context])
    return seconds
