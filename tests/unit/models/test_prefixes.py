"""What is cached of sequences: found by their tokens, bounded by bytes, apart by salt."""

from __future__ import annotations

from itertools import takewhile
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from foretoken.models import prefix_cache
from foretoken.models.prefix_cache import PrefixCache, count_shared_tokens

TEXT = st.lists(st.integers(0, 2), max_size=8)


@pytest.mark.parametrize("array", [torch.zeros(100), np.zeros(100, np.float32)])
def test_the_least_recently_used_gives_way(array: Any) -> None:
    cached = PrefixCache(3 * 400, divisible=False)
    for n in (1, 2, 3):
        cached.add("", [7] * n, [array])
    assert cached.find("", [7])[0] == 1  # used again
    cached.add("", [7] * 4, [array])
    assert [cached.find("", [7] * n)[0] for n in range(1, 6)] == [1, 1, 3, 4, 4]
    assert cached.find("other", [7] * 4) == (0, None)


def test_ids_may_exceed_32_bits() -> None:
    """A draft's first id stands for two tokens of the target's vocabulary."""
    cached = PrefixCache(10**6, divisible=True)
    cached.add("", [150_000**2, 5], [np.zeros(1)])
    assert cached.find("", [150_000**2, 5, 6])[0] == 2
    assert cached.find("", [150_000**2 + 2**32, 5])[0] == 0


def test_what_is_larger_than_all_room_is_not_cached() -> None:
    cached = PrefixCache(399, divisible=True)
    cached.add("", [7], [torch.zeros(100)])
    assert cached.find("", [7]) == (0, None)


def test_a_longer_sequence_stands_for_those_it_begins_with() -> None:
    released: list[Any] = []
    cached = PrefixCache(10**6, divisible=True, release=released.append)
    for text in ([1, 2], [1, 3], [1, 2, 4], [1, 2], [1, 2, 4]):
        cached.add("", text, [np.array(text)])
    cached.add("other", [1, 3, 5], [np.zeros(1)])
    assert len(cached) == 3 and [len(x) for (x,) in released] == [2, 2, 3]
    assert cached.find("", [1, 2, 5])[0] == 2 and cached.find("", [1, 3, 5])[0] == 2
    cached.clear()
    assert len(cached) == 0 and len(released) == 6


def test_many_long_prefixes_are_found_by_few_comparisons() -> None:
    """Sequences that share thousands of tokens, as those behind one system prompt."""
    cached, head = PrefixCache(10**9, divisible=True), [*range(9000)]
    with pytest.MonkeyPatch.context() as patch:
        count = 0
        real = prefix_cache._count_shared_bytes

        def counted(one: bytes, other: bytes) -> int:
            nonlocal count
            count += 1
            return real(one, other)

        patch.setattr(prefix_cache, "_count_shared_bytes", counted)
        for i in range(100):
            cached.add("", [*head, i, *head[:99]], [np.zeros(1)])
        assert [cached.find("", [*head, i, 5])[0] for i in range(100)] == [9001] * 100
    assert count < 100 * 20


@given(texts=st.lists(TEXT, max_size=6), prompt=TEXT, divisible=st.booleans())
def test_the_longest_prefix_is_found(
    texts: list[list[int]], prompt: list[int], divisible: bool
) -> None:
    cached = PrefixCache(10**6, divisible=divisible)
    for text in texts:
        cached.add("", text, [np.array(text)])
        same = takewhile(lambda pair: pair[0] == pair[1], zip(text, prompt, strict=False))
        assert count_shared_tokens(text, prompt) == len([*same])
    length, arrays = cached.find("", prompt)
    counts = [count_shared_tokens(text, prompt) for text in texts]
    whole = [n for n, text in zip(counts, texts, strict=True) if divisible or n == len(text)]
    assert length == max(whole, default=0)
    if length:
        assert arrays[0][:length].tolist() == prompt[:length]
