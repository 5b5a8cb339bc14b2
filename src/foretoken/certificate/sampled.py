"""A pair at its temperature: continuations whose distribution is known, and numbers that are
uniform if every token follows its own distribution, watched at every step."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from foretoken.certificate.identity import replay
from foretoken.drafters.base import Draft, Drafter, DrafterBase
from foretoken.measurement.estimate import (
    Test,
    Uniforms,
    balanced,
    binned,
    two_samples,
    uniforms,
    unrelated,
)
from foretoken.options import Prompt
from foretoken.request import Completion, Request, uninterrupted
from foretoken.sampling.draw import Draw
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verify import Rule
from foretoken.speculator import BATCH, Speculator

Text = tuple[int, ...]


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


def tables(
    sample: Sequence[list[Text]], ours: Sequence[list[Text]], theirs: Sequence[list[Text]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts of two samples by prompt, in the cells of a third one."""
    cells = [Cells(texts) for texts in sample]
    return [
        (cell.counts(a), cell.counts(b)) for cell, a, b in zip(cells, ours, theirs, strict=True)
    ]


@dataclass(slots=True)
class Log:
    """Records of a drafter's draft tokens."""

    guesses: int = 0
    certain: int = 0  # of them: without a q
    uniforms: list[Uniforms] = field(default_factory=list[Uniforms])  # of those with a q
    lies: list[str] = field(default_factory=list[str])


class Watched(DrafterBase):
    """A Drafter that does what `drafter` does, and logs it."""

    def __init__(self, drafter: Drafter, seed: int) -> None:
        self.drafter, self.log = drafter, Log()
        self.holds = (drafter,)
        self._noise = torch.Generator().manual_seed(seed)
        self._texts: list[list[int]] = []
        self._counted: list[int] = []  # how far each row's draft tokens are in the log's numbers
        self._certain: dict[tuple[int, ...], int] = {}  # text -> the certain draft token behind it

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        heads = sources or [[] for _ in prompts]
        self._texts += [[*head, *prompt] for head, prompt in zip(heads, prompts, strict=True)]
        self._counted += [0] * len(prompts)
        self.drafter.start(rows, prompts, sources)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        recorded = Recorded(draw)
        draft = self.drafter.propose(gamma, recorded)  # pyright: ignore[reportArgumentType]
        tokens = draft.tokens.cpu().long()
        for b, count in enumerate(draft.lengths.tolist()):
            self.log.guesses += count
            if draft.q is None:
                self.log.certain += count
                self._check_certain(b, tokens[b, :count].tolist())
            elif count:
                self._check_drawn(b, tokens[b, :count], draft.q[b, :count], recorded)
        return draft

    def _check_drawn(self, b: int, tokens: Tensor, q: Tensor, recorded: Recorded) -> None:
        first = len(self._texts[b])
        new = max(0, self._counted[b] - first) if recorded.coupled else 0
        self._counted[b] = max(self._counted[b], first + len(tokens))
        noise = torch.rand(len(tokens), generator=self._noise, dtype=torch.float64)
        self.log.uniforms.append(uniforms(q[new:].cpu(), tokens[new:], noise[new:]))
        for i, token in enumerate(tokens.tolist()):
            if i not in recorded.draws:
                continue  # drawn by other means: the numbers tell
            distribution, ids = recorded.draws[i]
            own, said = distribution[b].cpu().double(), q[i].cpu().double()
            drawn = int(ids[b])
            same = token == drawn
            if len(own) < len(said):  # over a draft's own ids: `uniforms` tell which these are
                same = bool(said[token] == own[drawn])
                own = functional.pad(own, (0, len(said) - len(own))).sort().values
                said = said.sort().values
            if not same:
                self.log.lies.append(f"guess {token} was not drawn: {drawn} was")
            elif distance := float((own - said).abs().sum() / 2):
                self.log.lies.append(
                    f"guess {token} was drawn from another law than the q reported, total "
                    f"variation {distance:.2g}"
                )

    def _check_certain(self, b: int, draft_tokens: list[int]) -> None:
        for i, token in enumerate(draft_tokens):
            earlier = self._certain.setdefault((*self._texts[b], *draft_tokens[:i]), token)
            if earlier != token:
                self.log.lies.append(
                    f"guesses {earlier} and {token} after the same text, both said to be certain"
                )

    def commit(self, tokens: list[list[int]]) -> None:
        for text, new in zip(self._texts, tokens, strict=True):
            text += new
        self.drafter.commit(tokens)

    def leave(self, rows: list[int]) -> None:
        stay = [b for b in range(len(self._texts)) if b not in rows]
        self._texts = [self._texts[b] for b in stay]
        self._counted = [self._counted[b] for b in stay]
        self.drafter.leave(rows)


class Recorded:
    """A Draw that remembers the distribution and the ids of every draft token."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.draws: dict[int, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draw, name)

    def sample(
        self, logits: Tensor, i: int, params: SamplingParams | None = None
    ) -> tuple[Tensor, Tensor | None]:
        ids, q = self._draw.sample(logits, i, params)
        if q is not None:
            self.draws[i] = q.clone(), ids
        return ids, q

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        ids = self._draw(distribution, i, cdf)
        self.draws[i] = distribution.clone(), ids
        return ids


ALONE = 11  # one text in so many runs alone; prime, so that every prompt has some of them

Track = Callable[[Sequence[int], str], Iterable[int]]


@dataclass(frozen=True, slots=True)
class SampledTrial:
    """A trial of `texts` sampled texts for every prompt, of `length` new tokens."""

    params: SamplingParams
    gamma: int
    rule: str | Rule
    texts: int
    length: int
    seed: int

    @property
    def name(self) -> str:
        params = self.params
        parts = [f"temperature {params.temperature:g}"]
        parts += [f"top-k {params.top_k}"] * (params.top_k > 0)
        parts += [f"top-p {params.top_p:g}"] * (params.top_p < 1)
        parts += [f"min-p {params.min_p:g}"] * (params.min_p > 0)
        return ", ".join(parts)


def completions(
    spec: Speculator,
    prompts: Sequence[Prompt],
    trial: SampledTrial,
    stream: int,
    track: Track,
    label: str,
) -> Iterable[tuple[range, list[Completion]]]:
    """`trial.texts` completions of every prompt, batch by batch, with their numbers; number k
    continues prompt k % len(prompts). No two streams share a random number. Some texts with draft
    tokens are made alone: a single row may take another path through the models."""
    count = trial.texts * len(prompts)
    for first in track(range(0, count, BATCH), f"{trial.name}: {label}"):
        batch = range(first, min(first + BATCH, count))
        alone = [k for k in batch if trial.gamma and k % ALONE == 0]
        completions_of: dict[int, Completion] = {}
        for numbers in ([k for k in batch if k not in alone], *([k] for k in alone)):
            completions_of |= zip(
                numbers, _generate(spec, prompts, trial, stream, numbers), strict=True
            )
        yield batch, [completions_of[k] for k in batch]


def _generate(
    spec: Speculator,
    prompts: Sequence[Prompt],
    trial: SampledTrial,
    stream: int,
    numbers: list[int],
) -> list[Completion]:
    rows = spec.generate(
        [prompts[k % len(prompts)] for k in numbers],
        replace(trial.params, max_new_tokens=trial.length),
        gamma=trial.gamma,
        rule=trial.rule,
        seed=[(trial.seed, (stream << 32) + k) for k in numbers],
    )
    return uninterrupted(rows)


@dataclass(slots=True)
class Evidence:
    """Sampled tokens under the target's distribution."""

    ranked: list[Tensor] = field(default_factory=list[Tensor])
    by_id: list[Tensor] = field(default_factory=list[Tensor])  # of one text each
    hits: list[Tensor] = field(default_factory=list[Tensor])  # tokens with q > p
    chances: list[Tensor] = field(default_factory=list[Tensor])  # of such a token under p

    def add(
        self,
        spec: Speculator,
        drafter: Drafter,
        requests: list[Request],
        texts: list[list[int]],
        params: SamplingParams,
        noise: torch.Generator,
    ) -> None:
        """The texts of one batch."""
        rows: list[list[Tensor]] = [[] for _ in texts]
        for place in replay(spec.target, drafter, requests, texts, params):
            fresh = torch.rand(len(place.rows), generator=noise, dtype=torch.float64)
            u = uniforms(place.p, place.tokens, fresh)
            self.ranked.append(u.ranked)
            for b, row in enumerate(place.rows):
                rows[row].append(u.by_id[b : b + 1])
            more = place.q.double() > place.p.double()
            self.hits.append(more.gather(1, place.tokens[:, None])[:, 0].double())
            self.chances.append(place.p.double().where(more, 0.0).sum(-1).clamp(max=1.0))
        self.by_id += [torch.cat(row) for row in rows if row]

    def tests(self, name: str, lags: int, level: float) -> list[Test]:
        """Test whether the tokens follow the target's distribution."""
        hits, chances, unit = torch.cat(self.hits), torch.cat(self.chances), "tokens"
        return [
            binned(f"{name}: target's law, by rank", unit, torch.cat(self.ranked), level),
            binned(f"{name}: target's law, by id", unit, torch.cat(self.by_id), level),
            balanced(f"{name}: pull towards the draft", unit, hits, chances, level),
            unrelated(f"{name}: independence along a text", unit, self.by_id, lags),
        ]


def against_the_distribution(
    spec: Speculator,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    trial: SampledTrial,
    level: float,
    track: Track,
    label: str = "speculative",
    stream: int = 0,
) -> tuple[list[Test], list[list[Text]]]:
    """Tests of speculative texts against the target's distributions, and the texts by prompt.
    `drafter`: the honest one, for the replay."""
    sampling = replace(trial.params, max_new_tokens=trial.length)
    evidence, texts_of = Evidence(), [[] for _ in prompts]
    noise = torch.Generator().manual_seed(trial.seed + 1)
    for numbers, rows in completions(spec, prompts, trial, stream, track, label):
        batch = [prompts[k % len(prompts)] for k in numbers]
        requests = spec.inputs.requests(batch, sampling, trial.seed)
        tokens = [row.tokens for row in rows]
        evidence.add(spec, drafter, requests, tokens, trial.params, noise)
        for k, text in zip(numbers, tokens, strict=True):
            texts_of[k % len(prompts)].append(tuple(text))
    return evidence.tests(trial.name, trial.gamma + 1, level), texts_of


def against_plain(
    spec: Speculator,
    prompts: Sequence[Prompt],
    texts_of: list[list[Text]],
    plain: SampledTrial,
    level: float,
    track: Track,
) -> list[Test]:
    """The same texts against as many plain ones, in cells made from a third, plain sample."""
    samples: list[list[list[Text]]] = []
    for stream in (1, 2):
        samples.append([[] for _ in prompts])
        for numbers, rows in completions(spec, prompts, plain, stream, track, f"plain {stream}"):
            for k, row in zip(numbers, rows, strict=True):
                samples[-1][k % len(prompts)].append(tuple(row.tokens))
    counted = tables(samples[0], texts_of, samples[1])
    name, unit = f"{plain.name}: against plain", "texts"
    tests = [
        two_samples(f"{name}, prompt {i}", unit, [table], level) for i, table in enumerate(counted)
    ]
    return [*tests, two_samples(f"{name}, all prompts", unit, counted, level)]
