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
    return [
        Logprobs(token, logprob, _top(row, count))
        for token, logprob, row in zip(tokens, own, known, strict=True)
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
