"""A token's logarithm, and those of the likeliest at its place."""

from __future__ import annotations

import math

import torch

from foretoken.sampling.logprobs import Logprobs, logprobs

KNOWN = torch.tensor([[0.1, 0.4, 0.1, 0.4], [1.0, 0.0, 0.0, 0.0]], dtype=torch.float64).log()


def test_the_likeliest_come_first_and_of_equals_the_lower_id():
    first, second = logprobs(KNOWN, [2, 0], 3)
    assert first == Logprobs(
        2, math.log(0.1), ((1, math.log(0.4)), (3, math.log(0.4)), (0, math.log(0.1))), 3
    )
    assert second == Logprobs(0, 0.0, ((0, 0.0), (1, -math.inf), (2, -math.inf)), 1)


def test_a_count_of_0_is_the_tokens_own_alone():
    first, second = logprobs(KNOWN, [1, 3], 0)
    assert first == Logprobs(1, math.log(0.4), (), 1) and second == Logprobs(3, -math.inf, (), 2)


def test_no_token():
    assert logprobs(KNOWN[:0], [], 2) == []
