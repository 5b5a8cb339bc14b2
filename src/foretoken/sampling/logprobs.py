"""How likely tokens were, and which were likelier: what a row may ask to be told."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One token's natural logarithm of probability, and those of the likeliest at its place, best
    first, of equals the lower id. rank: 1 for a likeliest one, and so on."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


def logprobs(known: Tensor, tokens: list[int], count: int) -> list[Logprobs]:
    """Of `tokens`, from the logarithms of their laws, `[n, V]`; `count`: the likeliest reported."""
    if not tokens:
        return []
    at = torch.tensor(tokens, device=known.device)[:, None]
    own = known.gather(1, at)
    values = cast(list[float], own[:, 0].tolist())
    ranks = cast(list[int], (1 + (known > own).sum(1)).tolist())
    return [
        Logprobs(token, value, _top(row, count), rank)
        for token, value, rank, row in zip(tokens, values, ranks, known, strict=True)
    ]


def _top(known: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest ids of `[V]`. Only what reaches the last of them is sorted: topk alone
    leaves the order of equals open."""
    if not count:
        return ()
    edge = known.topk(count).values[-1]
    ids = (known >= edge).nonzero()[:, 0]
    ids = ids[known[ids].argsort(descending=True, stable=True)[:count]]
    pairs = zip(cast(list[int], ids.tolist()), known[ids].tolist(), strict=True)
    return tuple(pairs)
