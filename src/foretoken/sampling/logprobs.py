"""Log-probabilities of tokens and of the likeliest alternatives, as a request may ask for them."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.transfer import to_list


@dataclass(frozen=True, slots=True)
class Logprobs:
    """One token's natural logarithm of probability, and those of the likeliest at its place, best
    first, of equals the lower id. rank: 1 for a likeliest one, and so on."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


def logprobs(scores: Tensor, tokens: list[int], count: int) -> list[Logprobs]:
    """Return the logprobs of `tokens`, from the logarithms of their distributions, `[n, V]`;
    `count`: the likeliest reported."""
    if not tokens:
        return []
    at = torch.tensor(tokens, device=scores.device)[:, None]
    token_scores = scores.gather(1, at)
    values: list[float] = to_list(token_scores[:, 0])
    ranks: list[int] = to_list(1 + (scores > token_scores).sum(1))
    return [
        Logprobs(token, value, _top(row, count), rank)
        for token, value, rank, row in zip(tokens, values, ranks, scores, strict=True)
    ]


def _top(scores: Tensor, count: int) -> tuple[tuple[int, float], ...]:
    """The `count` likeliest ids of `[V]`. Only what reaches the last of them is sorted: topk alone
    leaves the order of equals open."""
    if not count:
        return ()
    edge = scores.topk(count).values[-1]
    ids = (scores >= edge).nonzero()[:, 0]
    ids = ids[scores[ids].argsort(descending=True, stable=True)[:count]]
    return tuple(zip(to_list(ids), to_list(scores[ids]), strict=True))
