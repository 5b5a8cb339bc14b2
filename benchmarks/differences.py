"""Texts of a server against those of the same pair offline: whether their first difference is
rounding.

At temperature 0 a token is the one of the greatest logit; by the coupled rule it is the one of the
greatest logit / temperature - log E, where the noise E is the position's own (docs/exactness.md). A
difference is rounding where both tokens lie, by the target's logits from single-token passes,
within a few times the measured noise of passes below the greatest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken import Speculator
from foretoken.certificate.greedy_identity import (
    NOISE_MARGIN,
    ShapeNoise,
    measure_shape_noise,
    score_token_by_token,
)
from foretoken.request import Request
from foretoken.sampling.keys import draw_exponentials
from foretoken.speculator import MAX_BATCH_SIZE
from streams import Asked

WIDTH = 8  # tokens of a pass over a block, for its noise


@dataclass(frozen=True, slots=True)
class Difference:
    """Where a served text first differs from the offline one."""

    seed: int
    text: int  # of the request
    temperature: float
    place: int  # among the new tokens
    offline: int | None  # the tokens there, None where the text had ended
    served: int | None
    gap: float | None  # how far the lesser one lies below the greatest
    allowed: float

    @property
    def rounding(self) -> bool:
        return self.gap is not None and self.gap <= self.allowed


class Offline:
    """The pair without a server. Each request's texts are made once."""

    def __init__(self, spec: Speculator) -> None:
        self.spec = spec
        self.shapes: ShapeNoise | None = None
        self._texts: dict[int, list[list[int]]] = {}

    def texts(self, query: Asked) -> list[list[int]]:
        if query.seed not in self._texts:
            completions = self.spec.generate(
                query.prompts,
                seed=[(query.seed, i) for i in range(len(query.prompts))],
                rule="coupled",
                temperature=query.temperature,
                max_new_tokens=query.max_tokens,
                ignore_eos=query.ignore_eos,
            )
            self._texts[query.seed] = [completion.tokens for completion in completions]
        return self._texts[query.seed]

    def measure(self, some: Sequence[Asked]) -> ShapeNoise:
        """The noise of passes, along the first texts of some requests. RuntimeError where it is
        more than rounding explains."""
        queries = some[:MAX_BATCH_SIZE]
        requests = [self._request(each, 0) for each in queries]
        texts = [self.texts(each)[0] for each in queries]
        self.shapes = measure_shape_noise(self.spec.target, requests, texts, WIDTH)
        if not self.shapes.ok:
            raise RuntimeError(f"passes differ by more than rounding: {self.shapes}")
        return self.shapes

    def difference(self, query: Asked, text: int, served: Sequence[int]) -> Difference | None:
        """None where they are equal."""
        assert self.shapes is not None
        own = self.texts(query)[text]
        pairs = enumerate(zip(own, served, strict=False))
        place = next((i for i, (a, b) in pairs if a != b), min(len(own), len(served)))
        if place == len(own) == len(served):
            return None
        tokens = [x[place] if place < len(x) else None for x in (own, served)]
        gap = None
        if None not in tokens:  # one text is longer: never rounding
            scores = self._scores(query, text, own[: place + 1])
            gap = float(scores.max() - scores[tokens].min())
        allowed = NOISE_MARGIN * self.shapes.noise / (query.temperature or 1.0)
        return Difference(query.seed, text, query.temperature, place, *tokens, gap, allowed)

    def _scores(self, query: Asked, text: int, own: list[int]) -> Tensor:
        """Of every id for the last of these tokens; the greatest is drawn."""
        request = self._request(query, text)
        logits = score_token_by_token(self.spec.target, request, own)[-1].double()
        if not query.temperature:
            return logits
        position = len(request.prompt) + len(own) - 1
        noise = torch.from_numpy(draw_exponentials(request.key, position, len(logits)))
        return logits / query.temperature - noise.log()

    def _request(self, query: Asked, text: int) -> Request:
        from foretoken.sampling.params import SamplingParams

        params = SamplingParams(query.temperature, max_new_tokens=query.max_tokens)
        (request,) = self.spec.inputs.make_requests(
            [query.prompts[text]], [params], [(query.seed, text)]
        )
        return request
