"""Sampled texts of a certificate: short continuations, speculative and plain, and what they show.

Every token is set against the law that the target gives it a token a pass, which is sharper than
comparing two samples; the two samples are compared as well, for they need no law.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from foretoken.drafters.base import Drafter
from foretoken.lab.certificate.continuations import Text, tables
from foretoken.lab.certificate.odds import Test, balanced, binned, two_samples, unrelated
from foretoken.lab.certificate.pit import places
from foretoken.lab.certificate.reference import replay
from foretoken.options import Prompt
from foretoken.request import Completion, Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.verify import Rule
from foretoken.speculator import BATCH, Speculator

ALONE = 11  # every so manieth text runs by itself; prime, so that every prompt has some

Track = Callable[[Sequence[int], str], Iterable[int]]


@dataclass(frozen=True, slots=True)
class Asked:
    """How texts are sampled: `texts` of every prompt, of `length` new tokens."""

    params: SamplingParams
    gamma: int
    rule: str | Rule
    texts: int
    length: int
    seed: int

    @property
    def name(self) -> str:
        own = self.params
        parts = (
            (True, f"temperature {own.temperature:g}"),
            (own.top_k > 0, f"top-k {own.top_k}"),
            (own.top_p < 1, f"top-p {own.top_p:g}"),
            (own.min_p > 0, f"min-p {own.min_p:g}"),
        )
        return ", ".join(said for wanted, said in parts if wanted)


def texts(
    spec: Speculator, prompts: Sequence[Prompt], asked: Asked, stream: int, track: Track, what: str
) -> Iterable[tuple[range, list[Completion]]]:
    """`asked.texts` completions of every prompt, batch by batch, with their numbers; number k
    continues prompt k % len(prompts). No two streams share a random number. Some texts with guesses
    are made alone: a single row may take another way through the models."""
    count = asked.texts * len(prompts)
    for first in track(range(0, count, BATCH), f"{asked.name}: {what}"):
        batch = range(first, min(first + BATCH, count))
        alone = [k for k in batch if asked.gamma and k % ALONE == 0]
        found: dict[int, Completion] = {}
        for numbers in ([k for k in batch if k not in alone], *([k] for k in alone)):
            made = _made(spec, prompts, asked, stream, numbers)
            found |= zip(numbers, made, strict=True)
        yield batch, [found[k] for k in batch]


def _made(
    spec: Speculator, prompts: Sequence[Prompt], asked: Asked, stream: int, numbers: list[int]
) -> list[Completion]:
    found = spec.generate(
        [prompts[k % len(prompts)] for k in numbers],
        max_new_tokens=asked.length,
        temperature=asked.params.temperature,
        top_k=asked.params.top_k,
        top_p=asked.params.top_p,
        min_p=asked.params.min_p,
        gamma=asked.gamma,
        rule=asked.rule,
        seed=[(asked.seed, (stream << 32) + k) for k in numbers],
    )
    if any(one.finish_reason == "interrupted" for one in found):
        raise KeyboardInterrupt
    return found


@dataclass(slots=True)
class Numbers:
    """Tokens as numbers: what they are under the target's law, row by row."""

    ranked: list[Tensor] = field(default_factory=list[Tensor])
    by_id: list[Tensor] = field(default_factory=list[Tensor])  # of one row each
    hits: list[Tensor] = field(default_factory=list[Tensor])  # tokens that the draft overrates
    chances: list[Tensor] = field(default_factory=list[Tensor])

    def add(
        self,
        spec: Speculator,
        drafter: Drafter,
        requests: list[Request],
        texts: list[list[int]],
        params: SamplingParams,
        noise: torch.Generator,
    ) -> None:
        """Texts of one batch."""
        rows: list[list[Tensor]] = [[] for _ in texts]
        for place in replay(spec.target, drafter, requests, texts, params):
            fresh = torch.rand(len(place.rows), generator=noise, dtype=torch.float64)
            found = places(place.p, place.tokens, fresh)
            self.ranked.append(found.ranked)
            for b, row in enumerate(place.rows):
                rows[row].append(found.by_id[b : b + 1])
            more = place.q.double() > place.p.double()
            self.hits.append(more.gather(1, place.tokens[:, None])[:, 0].double())
            self.chances.append(place.p.double().where(more, 0.0).sum(-1).clamp(max=1.0))
        self.by_id += [torch.cat(row) for row in rows if row]

    def tests(self, name: str, lags: int, level: float) -> list[Test]:
        """Whether the tokens follow the target's law."""
        by_id = torch.cat(self.by_id)
        hits, chances = torch.cat(self.hits), torch.cat(self.chances)
        of = "tokens"
        return [
            binned(f"{name}: target's law, by rank", of, torch.cat(self.ranked), level),
            binned(f"{name}: target's law, by id", of, by_id, level),
            balanced(f"{name}: pull towards the draft", of, hits, chances, level),
            unrelated(f"{name}: independence along a text", of, self.by_id, lags),
        ]


def against_the_law(
    spec: Speculator,
    drafter: Drafter,
    prompts: Sequence[Prompt],
    asked: Asked,
    level: float,
    track: Track,
    what: str = "speculative",
    stream: int = 0,
) -> tuple[list[Test], list[list[Text]]]:
    """Speculative texts against the target's own laws, and the texts by prompt. `drafter`: the
    honest one, for the replay."""
    numbers, ours = Numbers(), [[] for _ in prompts]
    noise = torch.Generator().manual_seed(asked.seed + 1)
    for at, found in texts(spec, prompts, asked, stream, track, what):
        batch = [prompts[k % len(prompts)] for k in at]
        requests = spec.requests(batch, asked.length, asked.seed)
        tokens = [one.tokens for one in found]
        numbers.add(spec, drafter, requests, tokens, asked.params, noise)
        for k, one in zip(at, tokens, strict=True):
            ours[k % len(prompts)].append(tuple(one))
    return numbers.tests(asked.name, asked.gamma + 1, level), ours


def against_plain(
    spec: Speculator,
    prompts: Sequence[Prompt],
    ours: list[list[Text]],
    plain: Asked,
    level: float,
    track: Track,
) -> list[Test]:
    """The same texts against as many plain ones, in cells that yet other plain ones make."""
    samples: list[list[list[Text]]] = []
    for stream in (1, 2):
        samples.append([[] for _ in prompts])
        for at, found in texts(spec, prompts, plain, stream, track, f"plain {stream}"):
            for k, one in zip(at, found, strict=True):
                samples[-1][k % len(prompts)].append(tuple(one.tokens))
    counted = tables(samples[0], ours, samples[1])
    name, of = f"{plain.name}: against plain", "texts"
    tests = [
        two_samples(f"{name}, prompt {i}", of, [table], level) for i, table in enumerate(counted)
    ]
    return [*tests, two_samples(f"{name}, all prompts", of, counted, level)]
