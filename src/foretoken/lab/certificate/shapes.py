"""Whether a pass over a block gives the logits of passes over single tokens, rollback and ragged
rows included.

Rounding makes them differ a little; this noise is what differences of greedy texts are judged by.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.lab.certificate.reference import singly
from foretoken.lease import leased
from foretoken.models.base import Model
from foretoken.request import Request

# Noise as a share of the logits' height above their mean. Rounding stays well below, a wrong cache
# far above: in float32 the default pair has 1.2e-6; the self-check refuses a structure from 1e-4 on
TOLERANCE = {
    "float64": 1e-9,
    "float32": 1e-4,
    "float16": 2e-2,
    "int8": 5e-2,
    "int4": 5e-2,
    "bfloat16": 1e-1,
}
LARGE = 1e30  # stands for NaN and infinity


@dataclass(frozen=True, slots=True)
class Shapes:
    """Logits of blocks against those of single tokens."""

    dtype: str  # that the target computes in
    positions: int
    noise: float  # the largest difference of any logit
    height: float  # of the largest logit above the mean one, on average
    variation: float  # the largest total variation of the laws at temperature 1
    allowed: float  # the noise that rounding explains

    @property
    def ok(self) -> bool:
        return self.noise <= self.allowed


def row_groups(count: int) -> list[list[int]]:
    """Rows that run together: all of them, and every second row alone too, as a single row may take
    another path through a model."""
    alone = [[row] for row in range(0, count, 2)] if count > 1 else []
    return [list(range(count)), *alone]


@torch.inference_mode()
def compare(
    target: Model, requests: Sequence[Request], texts: Sequence[list[int]], width: int
) -> Shapes:
    """Blocks of up to `width` tokens along the new `texts` of the requests, in one batch and alone,
    some tokens of each block wrong and rolled back. RefusedError where the target is in use."""
    alone = [singly(target, request, text) for request, text in zip(requests, texts, strict=True)]
    noise = variation = height = 0.0
    positions = 0
    for row, at, logits in _grouped(target, requests, texts, width):
        expected, logits = alone[row][at].double(), logits.double().cpu()
        distances = torch.where(logits == expected, 0.0, (logits - expected).abs())
        law, other = logits.softmax(-1), expected.softmax(-1)
        noise = max(noise, float(distances.nan_to_num(LARGE, posinf=LARGE).max()))
        variation = max(variation, float((law - other).abs().sum() / 2))
        finite = expected[expected.isfinite()]
        height += float(finite.max() - finite.mean())
        positions += 1
    height /= max(1, positions)
    allowed = TOLERANCE[target.computed] * height
    return Shapes(target.computed, positions, noise, height, variation, allowed)


def _grouped(
    target: Model, requests: Sequence[Request], texts: Sequence[list[int]], width: int
) -> Iterator[tuple[int, int, Tensor]]:
    for rows in row_groups(len(requests)):
        own = [requests[row] for row in rows], [texts[row] for row in rows]
        for b, at, logits in _blockwise(target, *own, width):
            yield rows[b], at, logits


def _blockwise(
    target: Model, requests: Sequence[Request], texts: Sequence[list[int]], width: int
) -> Iterator[tuple[int, int, Tensor]]:
    """Row, place and logits `[V]` at every place behind a beginning of the text."""
    live, scored = [row for row, text in enumerate(texts) if text], [0] * len(texts)
    sources = [list(requests[row].source or []) for row in live]
    prompts = [requests[row].prompt[:-1] for row in live]
    with leased(target) as lease:
        target.start(prompts, sources if target.encoder_decoder else None)
        step = 0
        while live:
            right = [(step + row) % width for row in live]  # guesses that follow the text
            blocks = [
                _block(requests[row], texts[row], scored[row], width, good, target.vocab_size)
                for row, good in zip(live, right, strict=True)
            ]
            logits = target.score(blocks, [len(block) for block in blocks]).clone()
            for b, row in enumerate(live):
                for i in range(min(right[b] + 1, len(blocks[b]))):
                    yield row, scored[row] + i, logits[b, i]
                scored[row] += min(right[b] + 1, len(blocks[b]))
            target.set_lengths([len(requests[row].prompt) - 1 + scored[row] for row in live])
            finished = [b for b, row in enumerate(live) if scored[row] == len(texts[row])]
            lease.leave(finished)
            live = [row for row in live if scored[row] < len(texts[row])]
            step += 1


def _block(
    request: Request, text: list[int], scored: int, width: int, right: int, V: int
) -> list[int]:
    """The last token and guesses, of which the first `right` follow the text; it ends with the
    text."""
    guesses = text[scored : min(scored + width, len(text)) - 1]
    wrong = [(token + 1) % V for token in guesses[right:]]
    return [[request.prompt[-1], *text][scored], *guesses[:right], *wrong]
