from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from foretoken.shared_cache import SharedCache


def test_threads_that_want_the_same_result_share_one_computation() -> None:
    cache, computed = SharedCache[int](4), list[int]()

    def compute(number: int) -> int:
        computed.append(number)
        time.sleep(0.2)
        return 2 * number

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(lambda n: cache.get(n, compute, n), [1, 2] * 8))
    assert results == [2, 4] * 8 and sorted(computed) == [1, 2]


def test_the_oldest_result_is_computed_again() -> None:
    cache, computed = SharedCache[int](2), list[int]()
    for key in (1, 2, 1, 3, 1, 2):
        cache.get(key, computed.append, key)
    assert computed == [1, 2, 3, 2]


def test_an_error_is_raised_and_computed_again() -> None:
    cache, tries = SharedCache[int](2), list[int]()

    def fail() -> int:
        tries.append(1)
        raise ValueError("no")

    for _ in range(2):
        with pytest.raises(ValueError, match="no"):
            cache.get("key", fail)
    assert len(tries) == 2
    assert cache.get("key", lambda: 5) == 5
