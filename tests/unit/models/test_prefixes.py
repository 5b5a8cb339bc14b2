"""What is cached of sequences: found by their tokens, bounded by bytes, apart by salt."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.models.prefixes import PrefixCache, shared

TEXT = st.lists(st.integers(0, 2), max_size=8)


@pytest.mark.parametrize("array", [torch.zeros(100), np.zeros(100, np.float32)])
def test_the_least_recently_used_gives_way(array: Any) -> None:
    cached = PrefixCache(3 * 400, divisible=False)
    for n in (1, 2, 3):
        cached.add("", [7] * n, [array])
    assert cached.find("", [7])[0] == 1  # used again
    cached.add("", [7] * 4, [array])
    assert [cached.find("", [7] * n)[0] for n in range(1, 6)] == [1, 1, 3, 4, 4]
    assert cached.find("other", [7] * 4) == (0, [])


def test_what_is_larger_than_all_room_is_not_cached() -> None:
    cached = PrefixCache(399, divisible=True)
    cached.add("", [7], [torch.zeros(100)])
    assert cached.find("", [7]) == (0, [])


def test_a_longer_sequence_stands_for_those_it_begins_with() -> None:
    cached = PrefixCache(10**6, divisible=True)
    for text in ([1, 2], [1, 3], [1, 2, 4]):
        cached.add("", text, [np.array(text)])
    cached.add("other", [1, 3, 5], [np.zeros(1)])
    assert sorted(prefix.tokens for prefix in cached.prefixes) == [[1, 2, 4], [1, 3], [1, 3, 5]]
    assert cached.find("", [1, 2, 5])[0] == 2


@given(texts=st.lists(TEXT, max_size=6), prompt=TEXT, divisible=st.booleans())
def test_the_longest_prefix_is_found(
    texts: list[list[int]], prompt: list[int], divisible: bool
) -> None:
    cached = PrefixCache(10**6, divisible=divisible)
    for text in texts:
        cached.add("", text, [np.array(text)])
    length, arrays = cached.find("", prompt)
    counts = [shared(text, prompt) for text in texts]
    whole = [n for n, text in zip(counts, texts, strict=True) if divisible or n == len(text)]
    assert length == max(whole, default=0)
    if length:
        assert arrays[0][:length].tolist() == prompt[:length]
