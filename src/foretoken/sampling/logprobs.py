"""Log probabilities of tokens and of the most probable tokens at their positions."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from foretoken.transfer import to_list


@dataclass(frozen=True, slots=True)
class Logprobs:
    """The log probability (natural) of a token. `top`: ids and log probabilities of the most
    probable tokens at the token's position, in descending order of probability, then in ascending
    order of ids. `rank`: 1 plus the number of tokens with a higher probability."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()
    rank: int = 0


def logprobs(scores: Tensor, tokens: list[int], count: int) -> list[Logprobs]:
    """Return the log probability of each token, with the `count` most probable ids at the token's
    position. scores: the log probabilities at the positions of the tokens, `[n, V]`."""
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
    """Return the `count` most probable ids of `scores [V]` and their scores. A stable sort orders
    equal scores by id; topk does not."""
    if not count:
        return ()
    edge = scores.topk(count).values[-1]
    ids = (scores >= edge).nonzero()[:, 0]
    ids = ids[scores[ids].argsort(descending=True, stable=True)[:count]]
    return tuple(zip(to_list(ids), to_list(scores[ids]), strict=True))
