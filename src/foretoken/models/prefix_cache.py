"""A prefix cache: stores the arrays that a model computed for sequences that have left, and finds
the entry that shares the longest prefix with a new sequence.

The contents of the arrays do not matter.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

TOKEN_BYTES = array("q").itemsize


class PrefixCache:
    """Cached prefixes of at most `limit` bytes in all; the least recently used are dropped first.

    limit: None for no limit; the caller then drops entries.
    divisible: True if an entry is also valid for a sequence that shares only the entry's first
        tokens: true of keys and values, not of recurrent states.
    release: Called with the arrays of each entry that is dropped.

    Entries may be any objects if `limit` is None; otherwise they are sequences of arrays.
    """

    def __init__(
        self,
        limit: int | None,
        *,
        divisible: bool,
        release: Callable[[Any], None] = lambda arrays: None,
    ) -> None:
        self.limit, self.divisible, self._release = limit, divisible, release
        # by salt and tokens, the most recently used last; entries are shared only within a salt
        self._arrays: OrderedDict[tuple[Hashable, bytes], Any] = OrderedDict()
        # sorted, so that keys with a common prefix are neighbours; after a Ctrl-C, some keys of
        # `_arrays` may be missing here
        self._sorted: dict[Hashable, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._arrays.values()])

    def find(self, salt: Hashable, tokens: list[int]) -> tuple[int, Any]:
        """Return the length in tokens of the longest cached prefix of `tokens`, and the arrays of
        an entry with this prefix; (0, None) if there is none."""
        key = array("q", tokens).tobytes()
        found = (
            self._find_nearest(salt, key) if self.divisible else self._find_whole_prefix(salt, key)
        )
        length = _count_shared_bytes(found, key) // TOKEN_BYTES
        if not length:
            return 0, None
        self._arrays.move_to_end((salt, found))
        return length, self._arrays[salt, found]

    def add(self, salt: Hashable, tokens: list[int], arrays: Any) -> None:
        """Cache the arrays of these tokens. If `divisible`, the new entry replaces an entry for a
        prefix of the tokens, and is itself dropped if an entry for a longer sequence begins with
        the tokens."""
        key = array("q", tokens).tobytes()
        if not key or (self.divisible and self.find(salt, tokens)[0] == len(tokens)):
            self._release(arrays)
            return
        before = self._find_whole_prefix(salt, key)
        if before and (self.divisible or before == key):
            self._drop(salt, before)
        self._arrays[salt, key] = arrays
        keys = self._sorted.setdefault(salt, [])
        keys.insert(bisect(keys, key), key)
        if self.limit is not None:
            total = sum(_count_bytes(each) for each in self._arrays.values())
            while total > self.limit:
                total -= _count_bytes(self.drop_oldest())

    def drop_oldest(self) -> Any:
        """Drop the least recently used entry and return its arrays."""
        return self._drop(*next(iter(self._arrays)))

    def clear(self) -> None:
        """Drop all entries."""
        while self._arrays:
            self.drop_oldest()

    def _drop(self, salt: Hashable, key: bytes) -> Any:
        keys = self._sorted.get(salt, [])
        if key in keys:
            keys.remove(key)
        if not keys:
            self._sorted.pop(salt, None)
        arrays = self._arrays.pop((salt, key))
        self._release(arrays)
        return arrays

    def _find_nearest(self, salt: Hashable, key: bytes) -> bytes:
        """Return the cached key that shares the longest prefix with `key`: one of the two
        neighbours of `key` in the sorted list."""
        keys = self._sorted.get(salt, [])
        index = bisect(keys, key)
        near = keys[max(0, index - 1) : index + 1]
        return max(near, key=lambda each: _count_shared_bytes(each, key), default=b"")

    def _find_whole_prefix(self, salt: Hashable, key: bytes) -> bytes:
        """Return the longest cached key that is a prefix of `key`; b"" if there is none."""
        keys = self._sorted.get(salt, [])
        while index := bisect(keys, key):  # if `before` is not a prefix, try the shared part
            before = keys[index - 1]
            length = _count_shared_bytes(before, key)
            if length == len(before):
                return before
            key = key[:length]
        return b""


def _count_bytes(arrays: Sequence[Any]) -> int:
    return sum(x.nbytes for x in arrays)


def _count_shared_bytes(one: bytes, other: bytes) -> int:
    """Return the length in bytes, in whole tokens, of the longest common prefix of two keys."""
    max_tokens = min(len(one), len(other)) // TOKEN_BYTES
    a, b = (np.frombuffer(x, np.int64, max_tokens) for x in (one, other))
    different = a != b
    first = int(different.argmax()) if max_tokens else 0
    return TOKEN_BYTES * (first if max_tokens and different[first] else max_tokens)


def count_shared_tokens(one: list[int], other: list[int]) -> int:
    """Return the length in tokens of the longest common prefix of two sequences."""
    low, high = 0, min(len(one), len(other)) + 1  # `low` tokens are shared, `high` are not
    middle = high - 1
    while low + 1 < high:
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
        middle = (low + high) // 2
    return low
