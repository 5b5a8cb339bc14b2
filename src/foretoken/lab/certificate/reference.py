"""The reference of a certificate: the target run plainly, one token a pass, without guesses.

Uses nothing of the step and never rolls back.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.controls.chain import chain
from foretoken.drafters.base import Draft, Drafter
from foretoken.lease import leased
from foretoken.models.base import Model
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams, law, one_hot
from foretoken.sampling.draw import Draw


@dataclass(frozen=True, slots=True)
class Place:
    """The rows whose new text reaches one place, and the laws there."""

    rows: list[int]
    tokens: Tensor  # [n]
    p: Tensor  # [n, V]
    q: Tensor  # [n, V]: of the drafter's first guess there, 0 where it makes none


@torch.inference_mode()
def replay(
    target: Model,
    drafter: Drafter,
    requests: Sequence[Request],
    texts: Sequence[list[int]],
    params: SamplingParams,
) -> Iterator[Place]:
    """The laws of both at every place of the new `texts` of the requests, which are read side by
    side. RefusedError where one of them is in use."""
    live = list(range(len(texts)))
    chains = [chain(request, target.vocab_size) for request in requests]
    sources = _sources(target, requests)
    with leased(target, drafter) as lease:
        lease.expect(len(texts))
        target.start([request.prompt[:-1] for request in requests], sources)
        drafter.start(live, [list(request.prompt) for request in requests], sources)
        for t in range(max(map(len, texts), default=0)):
            finished = [b for b, row in enumerate(live) if len(texts[row]) <= t]
            if finished:
                lease.leave(finished)
                live = [row for row in live if len(texts[row]) > t]
            keys = [requests[row].key for row in live]
            lengths = [len(requests[row].prompt) + t for row in live]
            wishes, shaping = [params] * len(live), [chains[row] for row in live]
            # as in a step before the pass, which may write where the guess was
            draft = drafter.propose([1] * len(live), Draw(keys, lengths, wishes, shaping))
            p = _logits(target, [requests[row] for row in live], [texts[r] for r in live], t)
            for b, row in enumerate(live):
                if (controls := chains[row]) is not None:
                    p[b] = controls.shape(p[b], [])
            tokens = [texts[row][t] for row in live]
            p = law(p, params).cpu()
            yield Place(live, torch.tensor(tokens), p, _first(draft, p))
            drafter.commit([[token] for token in tokens])
            for row in live:
                if (controls := chains[row]) is not None:
                    controls.commit([texts[row][t]])


@torch.inference_mode()
def singly(target: Model, request: Request, text: list[int]) -> Tensor:
    """The target's own logits for every token of `text`, which continues the request:
    `[len(text), V]`, one row alone, a token a pass. RefusedError where the target is in use."""
    with leased(target):
        target.start([request.prompt[:-1]], _sources(target, [request]))
        return torch.cat([_logits(target, [request], [text], t).cpu() for t in range(len(text))])


def _logits(target: Model, requests: list[Request], texts: list[list[int]], t: int) -> Tensor:
    """The target's own logits at new place t of every row, `[B, V]`."""
    last = [[[request.prompt[-1], *text][t]] for request, text in zip(requests, texts, strict=True)]
    return target.score(last, [1] * len(last))[:, 0].clone()


def _first(draft: Draft, p: Tensor) -> Tensor:
    """The law of the first guess of every row, `[n, V]` as p."""
    if not draft.tokens.shape[1]:
        return torch.zeros_like(p)
    guessed = (draft.lengths > 0).to(p)[:, None].cpu()
    if draft.q is not None:
        return draft.q[:, 0].cpu().nan_to_num() * guessed
    return one_hot(draft.tokens[:, 0].cpu().long(), p.shape[1]).to(p) * guessed


def _sources(target: Model, requests: Sequence[Request]) -> list[list[int]] | None:
    """Copies: a drafter may keep what it is given."""
    return [list(r.source or []) for r in requests] if target.encoder_decoder else None
