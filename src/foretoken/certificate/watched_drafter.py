"""Tests whether draft tokens have the distribution q that the drafter reports for them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.drafters.base import Draft, Drafter
from foretoken.measurement.estimate import (
    HypothesisTest,
    TokenUniforms,
    compute_uniforms,
    run_uniformity_test,
)
from foretoken.sampling.draw import Draw
from foretoken.sampling.params import SamplingParams


@dataclass(slots=True)
class DraftLog:
    """A log of a drafter's draft tokens."""

    num_draft_tokens: int = 0
    num_certain: int = 0  # draft tokens without a q
    uniforms: list[TokenUniforms] = field(default_factory=list[TokenUniforms])  # of tokens with a q
    lies: list[str] = field(default_factory=list[str])  # tokens not sampled from the reported q


class WatchedDrafter(Drafter):
    """A Drafter that proposes the draft tokens of `drafter` and logs them."""

    def __init__(self, drafter: Drafter, seed: int) -> None:
        self.drafter, self.log = drafter, DraftLog()
        self.holds = (drafter,)
        self._noise = torch.Generator().manual_seed(seed)
        self._sequences: list[list[int]] = []
        # for each sequence, the length up to which draft tokens are in the log's uniforms
        self._counted_lengths: list[int] = []
        self._certain: dict[tuple[int, ...], int] = {}  # tokens -> certain next draft token

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        heads = sources or [[] for _ in prompts]
        self._sequences += [[*head, *prompt] for head, prompt in zip(heads, prompts, strict=True)]
        self._counted_lengths += [0] * len(prompts)
        self.drafter.start(rows, prompts, sources)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        recorded = RecordingDraw(draw)
        draft = self.drafter.propose(gamma, recorded)  # pyright: ignore[reportArgumentType]
        tokens = draft.tokens.cpu().long()
        for b, count in enumerate(draft.lengths.tolist()):
            self.log.num_draft_tokens += count
            if draft.q is None:
                self.log.num_certain += count
                self._check_certain(b, tokens[b, :count].tolist())
            elif count:
                self._check_drawn(b, tokens[b, :count], draft.q[b, :count], recorded)
        return draft

    def _check_drawn(self, b: int, tokens: Tensor, q: Tensor, recorded: RecordingDraw) -> None:
        first = len(self._sequences[b])
        # in coupled mode, a position that is drafted again has the same noise: do not test it again
        new = max(0, self._counted_lengths[b] - first) if recorded.coupled else 0
        self._counted_lengths[b] = max(self._counted_lengths[b], first + len(tokens))
        noise = torch.rand(len(tokens), generator=self._noise, dtype=torch.float64)
        self.log.uniforms.append(compute_uniforms(q[new:].cpu(), tokens[new:], noise[new:]))
        for i, token in enumerate(tokens.tolist()):
            if i not in recorded.draft_distributions:
                continue  # a token sampled without `draw`: only `uniforms` test it
            distribution, ids = recorded.draft_distributions[i]
            own, reported = distribution[b].cpu().double(), q[i].cpu().double()
            drawn = int(ids[b])
            same = token == drawn
            # a draft of fewer ids: compare sorted probabilities; `uniforms` test the ids
            if len(own) < len(reported):
                same = bool(reported[token] == own[drawn])
                own = functional.pad(own, (0, len(reported) - len(own))).sort().values
                reported = reported.sort().values
            if not same:
                self.log.lies.append(f"draft token {token} was proposed, but {drawn} was sampled")
            elif distance := float((own - reported).abs().sum() / 2):
                self.log.lies.append(
                    f"draft token {token} was sampled from another distribution than the q "
                    f"reported, total variation {distance:.2g}"
                )

    def _check_certain(self, b: int, draft_tokens: list[int]) -> None:
        for i, token in enumerate(draft_tokens):
            earlier = self._certain.setdefault((*self._sequences[b], *draft_tokens[:i]), token)
            if earlier != token:
                self.log.lies.append(
                    f"draft tokens {earlier} and {token} were both reported as certain after the "
                    "same tokens"
                )

    def commit(self, tokens: list[list[int]]) -> None:
        for sequence, new in zip(self._sequences, tokens, strict=True):
            sequence += new
        self.drafter.commit(tokens)

    def leave(self, rows: list[int]) -> None:
        remaining = [b for b in range(len(self._sequences)) if b not in rows]
        self._sequences = [self._sequences[b] for b in remaining]
        self._counted_lengths = [self._counted_lengths[b] for b in remaining]
        self.drafter.leave(rows)


class RecordingDraw:
    """A Draw that records the distribution and the ids of every draft token."""

    def __init__(self, draw: Draw) -> None:
        self._draw = draw
        self.draft_distributions: dict[int, tuple[Tensor, Tensor]] = {}

    def __getattr__(self, name: str) -> Any:
        return getattr(self._draw, name)

    def sample(
        self, logits: Tensor, i: int, params: SamplingParams | None = None
    ) -> tuple[Tensor, Tensor | None]:
        ids, q = self._draw.sample(logits, i, params)
        if q is not None:
            self.draft_distributions[i] = q.clone(), ids
        return ids, q

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        ids = self._draw(distribution, i, cdf)
        self.draft_distributions[i] = distribution.clone(), ids
        return ids


def run_draft_token_tests(
    name: str, draft_tokens: list[TokenUniforms], level: float
) -> list[HypothesisTest]:
    """Test whether draft tokens have the distribution q that was reported with them. Return [] if
    no draft token has a q."""
    if not draft_tokens:
        return []
    ranked = torch.cat([u.ranked for u in draft_tokens])
    by_id = torch.cat([u.by_id for u in draft_tokens])
    name, unit = f"{name}: draft tokens under q", "draft tokens"
    return [
        run_uniformity_test(f"{name}, by rank", unit, ranked, level),
        run_uniformity_test(f"{name}, by id", unit, by_id, level),
    ]
