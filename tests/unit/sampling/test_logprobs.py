"""Logprobs of tokens and of the likeliest, of equals the lower id first."""

from __future__ import annotations

import torch

from foretoken.sampling.logprobs import Logprobs, logprobs

KNOWN = torch.tensor([[0.5, 0.25, 0.25], [0.0, 1.0, 0.0]]).log()


def test_the_tokens_own_alone() -> None:
    first, second = logprobs(KNOWN, [1, 1], 0)
    assert first == Logprobs(1, float(KNOWN[0, 1])) and second == Logprobs(1, 0.0)


def test_the_likeliest_best_first() -> None:
    (first,) = logprobs(KNOWN[:1], [2], 2)
    assert [token for token, _ in first.top] == [0, 1]
    assert [value for _, value in first.top] == KNOWN[0, :2].tolist()


def test_an_impossible_token_is_said_to_be() -> None:
    assert logprobs(KNOWN[1:], [0], 3)[0].logprob == -torch.inf


def test_none() -> None:
    assert logprobs(KNOWN[:0], [], 3) == []
