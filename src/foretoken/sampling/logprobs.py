"""How likely tokens were, and which were likelier: what a row may ask to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One token's natural logarithm of probability, and those of the likeliest at its place, best
    first, of equals the lower id."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


def logprobs(known: Tensor, tokens: list[int], count: int) -> list[Logprobs]:
    """Of `tokens`, from the logarithms of their laws, `[n, V]`; `count`: the likeliest reported."""
    if not tokens:
        return []
    at = torch.tensor(tokens, device=known.device)[:, None]
    own = cast(list[float], known.gather(1, at)[:, 0].tolist())
    best = torch.sort(known, stable=True, descending=True) if count else None
    tops: list[list[tuple[int, float]]] = [[] for _ in tokens]
    if best is not None:
        ids, values = best.indices[:, :count].tolist(), best.values[:, :count].tolist()
        tops = [list(zip(*pair, strict=True)) for pair in zip(ids, values, strict=True)]
    return [
        Logprobs(token, logprob, tuple(top))
        for token, logprob, top in zip(tokens, own, tops, strict=True)
    ]
