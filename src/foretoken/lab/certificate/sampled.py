"""The sampled texts of a certificate: short continuations, speculative and plain, and their tests.

Every token is tested against the law that the target gives it a token a pass, which is sharper than
comparing two samples; the two samples are compared too, as that needs no law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from foretoken.drafters.base import Drafter
from foretoken.lab.certificate.continuations import Text, tables
from foretoken.lab.certificate.odds import Test, balanced, binned, two_samples, unrelated
from foretoken.lab.certificate.pit import uniforms
from foretoken.lab.certificate.reference import replay
from foretoken.lab.uninterrupted import uninterrupted
from foretoken.options import Prompt
from foretoken.request import Completion, Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.verify import Rule
from foretoken.speculator import BATCH, Speculator

ALONE = 11  # one text in so many runs alone; prime, so that every prompt has some of them

Track = Callable[[Sequence[int], str], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Trial:
    """How texts are sampled: `texts` for every prompt, of `length` new tokens."""

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
    spec: Speculator, prompts: Sequence[Prompt], trial: Trial, stream: int, track: Track, label: str
) -> Iterable[tuple[range, list[Completion]]]:
    """`trial.texts` completions of every prompt, batch by batch, with their numbers; number k
    continues prompt k % len(prompts). No two streams share a random number. Some texts with guesses
    are made alone: a single row may take another path through the models."""
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
    spec: Speculator, prompts: Sequence[Prompt], trial: Trial, stream: int, numbers: list[int]
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
    """Sampled tokens under the target's law."""

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
        """Whether the tokens follow the target's law."""
        hits, chances, unit = torch.cat(self.hits), torch.cat(self.chances), "tokens"
        return [
            binned(f"{name}: target's law, by rank", unit, torch.cat(self.ranked), level),
            binned(f"{name}: target's law, by id", unit, torch.cat(self.by_id), level),
            balanced(f"{name}: pull towards the draft", unit, hits, chances, level),
            unrelated(f"{name}: independence along a text", unit, self.by_id, lags),
        ]


def against_the_law(
    spec: Speculator,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    trial: Trial,
    level: float,
    track: Track,
    label: str = "speculative",
    stream: int = 0,
) -> tuple[list[Test], list[list[Text]]]:
    """Tests of speculative texts against the target's laws, and the texts by prompt. `drafter`: the
    honest one, for the replay."""
    wishes = replace(trial.params, max_new_tokens=trial.length)
    evidence, texts_of = Evidence(), [[] for _ in prompts]
    noise = torch.Generator().manual_seed(trial.seed + 1)
    for numbers, rows in completions(spec, prompts, trial, stream, track, label):
        batch = [prompts[k % len(prompts)] for k in numbers]
        requests = spec.requests(batch, wishes, trial.seed)
        tokens = [row.tokens for row in rows]
        evidence.add(spec, drafter, requests, tokens, trial.params, noise)
        for k, text in zip(numbers, tokens, strict=True):
            texts_of[k % len(prompts)].append(tuple(text))
    return evidence.tests(trial.name, trial.gamma + 1, level), texts_of


def against_plain(
    spec: Speculator,
    prompts: Sequence[Prompt],
    texts_of: list[list[Text]],
    plain: Trial,
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
