"""The texts that a draft is taught on, and who writes them.

On-policy: the draft itself, as it is at that step. Off-policy: the target (by speculative decoding
with that draft, so in its own distribution), or the data (Agarwal et al., arXiv 2306.13649; Zhou et
al., DistillSpec, arXiv 2310.08461). A batch depends on the seed, the step and the draft alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.models.rows import padded
from foretoken.options import Seed
from foretoken.request import Request
from foretoken.sampling.params import SamplingParams
from foretoken.train.examples import Example, completed
from foretoken.train.pair import Pair

GAMMA = 4  # fixed: one chosen by the clock would give a resumed run other texts
Author = Literal["draft", "target", "data"]


@dataclass(frozen=True, slots=True)
class LessonText:
    """A request, and the new tokens behind it."""

    request: Request
    new: list[int]


@dataclass(frozen=True, slots=True)
class Authors:
    """Makes batches. Texts in neither share are the data's where they hold a reference, else the
    target's."""

    pair: Pair
    temperature: float
    length: int  # new tokens at most
    on_policy: float = 0.0  # the share of texts that the draft writes
    target_generated: float = 0.0  # the share that the target writes

    def batch(
        self, examples: Sequence[Example], size: int, seed: int, step: int
    ) -> list[LessonText]:
        """`size` texts, drawn with replacement."""
        random = np.random.default_rng((seed, step))
        picked = [examples[i] for i in random.integers(len(examples), size=size).tolist()]
        shares = random.random(size).tolist()
        keys = [(seed, step * size + i) for i in range(size)]
        requests = self.requests(picked, keys)
        new = [
            [int(token) for token in example.reference][: request.limit]
            for example, request in zip(picked, requests, strict=True)
        ]
        authors = [self._author(share, text) for share, text in zip(shares, new, strict=True)]
        for author in ("draft", "target"):
            rows = [i for i in range(size) if authors[i] == author]
            written = self._written(author, [picked[i] for i in rows], [keys[i] for i in rows])
            for i, text in zip(rows, written, strict=True):
                new[i] = text
        return [LessonText(r, text) for r, text in zip(requests, new, strict=True)]

    def _author(self, share: float, reference: list[int]) -> Author:
        """Whose text it is, by a number in [0, 1)."""
        if share < self.on_policy:
            return "draft"
        off_policy = share < self.on_policy + self.target_generated
        return "target" if off_policy or not reference else "data"

    def exam(self, examples: Sequence[Example], count: int, seed: int) -> list[LessonText]:
        """The target's own continuation of up to `count` examples, evenly spread, without a draft:
        the prefixes on which alpha is measured (C57: paper, section 4)."""
        picked = examples[:: max(1, len(examples) // count)][:count]
        keys = [(seed, 2**62 + i) for i in range(len(picked))]
        written = self._written("target", picked, keys, gamma=0)
        requests = self.requests(picked, keys)
        return [LessonText(r, text) for r, text in zip(requests, written, strict=True)]

    def longest(self, examples: Sequence[Example]) -> int:
        """The most tokens that a text may have, the decoder's prompt included."""
        sampled = self.on_policy + self.target_generated > 0  # such texts may reach the limit
        return max(
            len(r.prompt) + (r.limit if sampled else min(r.limit, len(e.reference) or r.limit))
            for e, r in zip(examples, self.requests(examples), strict=True)
        )

    def requests(self, examples: Sequence[Example], keys: Seed = 0) -> list[Request]:
        """Return the requests of the examples; raises InputError for a prompt that the target
        cannot hold."""
        prompts = [[int(token) for token in e.prompt] for e in examples]
        return self.pair.together.inputs.requests(list(prompts), self._sampling, keys)

    def _written(
        self,
        author: Author,
        examples: Sequence[Example],
        keys: list[tuple[int, int]],
        gamma: int = GAMMA,
    ) -> list[list[int]]:
        if not examples:
            return []
        spec = self.pair.alone if author == "draft" else self.pair.together
        prompts = [[int(token) for token in e.prompt] for e in examples]
        completions = completed(spec, prompts, params=self._sampling, gamma=gamma, seed=keys)
        return [text.tokens for text in completions]

    @property
    def _sampling(self) -> SamplingParams:
        return SamplingParams(self.temperature, max_new_tokens=self.length)


def logits(network: PreTrainedModel, texts: list[LessonText]) -> Tensor:
    """At the new tokens of all texts, in order, without forced ones, `[N, V]`."""
    ids = padded([[*t.request.prompt, *t.new[:-1]] for t in texts], network.device)
    return scores(network, texts, ids)[_judged(texts, ids.shape[1]).to(network.device)]


def scores(network: PreTrainedModel, texts: list[LessonText], ids: Tensor) -> Tensor:
    """Logits behind each of the texts' `ids [B, T]`, `[B, T, V]`."""
    device = network.device
    sources = [t.request.source for t in texts if t.request.source is not None]
    if not sources:
        return network(input_ids=ids, use_cache=False).logits
    source_ids = padded(sources, device)
    lengths = torch.tensor([len(s) for s in sources], device=device)
    mask = torch.arange(source_ids.shape[1], device=device) < lengths[:, None]
    return network(
        input_ids=source_ids, attention_mask=mask.long(), decoder_input_ids=ids, use_cache=False
    ).logits


def _judged(texts: list[LessonText], width: int) -> Tensor:
    """Where a new token is predicted that is not forced, `[B, width]`."""
    mask = torch.zeros(len(texts), width, dtype=torch.bool)
    for b, text in enumerate(texts):
        first = len(text.request.prompt) - 1
        mask[b, first : first + len(text.new)] = True
        for place in text.request.forced:
            if 0 <= place < len(text.new):
                mask[b, first + place] = False
    return mask
