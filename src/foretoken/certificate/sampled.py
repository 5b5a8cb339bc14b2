"""Texts sampled from a pair: whether their tokens follow the target's distribution, and whether the
texts are like plain ones."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from foretoken.certificate.identity import replay
from foretoken.drafters.base import Drafter
from foretoken.inputs import Prompt
from foretoken.measurement.estimate import (
    Test,
    balanced,
    binned,
    two_samples,
    uniforms,
    unrelated,
)
from foretoken.request import uninterrupted
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verify import Rule
from foretoken.speculator import MAX_ROWS, Speculator

Text = tuple[int, ...]
Track = Callable[[Sequence[int], str], Iterable[int]]
ALONE = 11  # one text in so many runs alone; prime, so that every prompt has some of them
PLAIN = "speculative"  # plain decoding does not go through the rule that is certified


@dataclass(frozen=True, slots=True)
class SampledTrial:
    """A trial of `texts` sampled texts for every prompt, of `length` new tokens."""

    spec: Speculator
    prompts: Sequence[Prompt]
    params: SamplingParams
    gamma: int
    rule: str | Rule
    texts: int
    length: int
    seed: int
    track: Track = lambda numbers, label: numbers
    label: str = "speculative"
    stream: int = 0  # of random numbers: no two streams share one

    @property
    def name(self) -> str:
        params = self.params
        parts = [f"temperature {params.temperature:g}"]
        parts += [f"top-k {params.top_k}"] * (params.top_k > 0)
        parts += [f"top-p {params.top_p:g}"] * (params.top_p < 1)
        parts += [f"min-p {params.min_p:g}"] * (params.min_p > 0)
        return ", ".join(parts)

    def batches(self) -> Iterator[tuple[list[Prompt], list[list[int]]]]:
        """Yield prompts and the tokens that continue each, batch by batch and the prompts in turn.
        Some texts with draft tokens are made alone: a single row may take another path through the
        models."""
        count, params = len(self.prompts), replace(self.params, max_new_tokens=self.length)
        last = self.texts * count
        for first in self.track(range(0, last, MAX_ROWS), f"{self.name}: {self.label}"):
            batch = range(first, min(first + MAX_ROWS, last))
            alone = [k for k in batch if self.gamma and k % ALONE == 0]
            made: dict[int, list[int]] = {}
            for numbers in ([k for k in batch if k not in alone], *([k] for k in alone)):
                rows = self.spec.generate(
                    [self.prompts[k % count] for k in numbers],
                    params,
                    gamma=self.gamma,
                    rule=self.rule,
                    seed=[(self.seed, (self.stream << 32) + k) for k in numbers],
                )
                tokens = (row.tokens for row in uninterrupted(rows))
                made |= zip(numbers, tokens, strict=True)
            yield [self.prompts[k % count] for k in batch], [made[k] for k in batch]

    def by_prompt(self, texts: Sequence[list[int]]) -> list[list[Text]]:
        """Sort all texts of the batches by their prompts."""
        return [[*map(tuple, texts[i :: len(self.prompts)])] for i in range(len(self.prompts))]


def against_the_distribution(
    trial: SampledTrial, drafter: Drafter, level: float
) -> tuple[list[Test], list[list[Text]]]:
    """Test whether sampled tokens follow the target's distribution; return the texts, by prompt,
    too. `drafter`: the honest one, for the replay."""
    spec, all_texts = trial.spec, list[list[int]]()
    ranked, by_id = list[Tensor](), list[Tensor]()  # by_id: of one text each
    hits, chances = list[Tensor](), list[Tensor]()  # tokens with q > p; of such a token under p
    noise = torch.Generator().manual_seed(trial.seed + 1)
    for prompts, texts in trial.batches():
        sampling = replace(trial.params, max_new_tokens=trial.length)
        requests = spec.inputs.requests(prompts, sampling, trial.seed)
        of_row: list[list[Tensor]] = [[] for _ in texts]
        for place in replay(spec.target, drafter, requests, texts, trial.params):
            fresh = torch.rand(len(place.rows), generator=noise, dtype=torch.float64)
            u = uniforms(place.p, place.tokens, fresh)
            ranked.append(u.ranked)
            for row, number in zip(place.rows, u.by_id.split(1), strict=True):
                of_row[row].append(number)
            more = place.q.double() > place.p.double()
            hits.append(more.gather(1, place.tokens[:, None])[:, 0].double())
            chances.append(place.p.double().where(more, 0.0).sum(-1).clamp(max=1.0))
        by_id += [torch.cat(row) for row in of_row if row]
        all_texts += texts
    name, unit, pull = trial.name, "tokens", (torch.cat(hits), torch.cat(chances))
    tests = [
        binned(f"{name}: target's law, by rank", unit, torch.cat(ranked), level),
        binned(f"{name}: target's law, by id", unit, torch.cat(by_id), level),
        balanced(f"{name}: pull towards the draft", unit, *pull, level),
        unrelated(f"{name}: independence along a text", unit, by_id, trial.gamma + 1),
    ]
    return tests, trial.by_prompt(all_texts)


class Cells:
    """A text belongs to its longest frequent beginning; the empty beginning is always a cell."""

    def __init__(self, sample: Iterable[Text], share: float = 0.04) -> None:
        texts = list(sample)
        counts = Counter(text[:n] for text in texts for n in range(1, len(text) + 1))
        frequent = [head for head, count in counts.items() if count >= share * len(texts)]
        self._cells = {head: i for i, head in enumerate([(), *sorted(frequent)])}

    def counts(self, texts: Iterable[Text]) -> np.ndarray:
        """Number of texts in each cell, float64."""
        counts = np.zeros(len(self._cells))
        for text in texts:
            counts[self._of(text)] += 1
        return counts

    def _of(self, text: Text) -> int:
        heads = (text[:n] for n in range(len(text), -1, -1))
        return next(self._cells[head] for head in heads if head in self._cells)


def against_plain(trial: SampledTrial, texts: list[list[Text]], level: float) -> list[Test]:
    """Test whether the texts, by prompt, are like as many plain ones, in cells made from a third,
    plain sample."""
    plain = replace(trial, gamma=0, rule=PLAIN, label="plain")
    samples = [
        trial.by_prompt(
            [text for _, made in replace(plain, stream=stream).batches() for text in made]
        )
        for stream in (1, 2)
    ]
    tables = [
        (cells.counts(ours), cells.counts(theirs))
        for cells, ours, theirs in zip(map(Cells, samples[0]), texts, samples[1], strict=True)
    ]
    name, unit = f"{trial.name}: against plain", "texts"
    tests = [
        two_samples(f"{name}, prompt {i}", unit, [table], level) for i, table in enumerate(tables)
    ]
    return [*tests, two_samples(f"{name}, all prompts", unit, tables, level)]
