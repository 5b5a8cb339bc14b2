"""A cache of what models computed of sequences that have left, for others that begin with the same
tokens: the longest prefix in common, and what gives way.

It does not know what that is: a model puts it in and copies it out.
"""

from __future__ import annotations

from array import array
from bisect import bisect
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any

import numpy as np

TOKEN_BYTES = array("i").itemsize


class PrefixCache:
    """Prefixes of at most `limit` bytes together; the least recently used give way.

    limit: None where the caller drops them. divisible: a prefix also serves sequences that begin
    with a part of its tokens, as keys and values do and states do not. release: is called with the
    arrays of each prefix that goes. Entries need to be arrays only if there is a limit.
    """

    def __init__(
        self,
        limit: int | None,
        *,
        divisible: bool,
        release: Callable[[Any], None] = lambda arrays: None,
    ) -> None:
        self.limit, self.divisible, self._release = limit, divisible, release
        # by salt and tokens, the last used last; sequences of another salt share nothing
        self._arrays: OrderedDict[tuple[Hashable, bytes], Any] = OrderedDict()
        # those that begin alike are near; after a Ctrl-C some may be missing, never too many
        self._sorted: dict[Hashable, list[bytes]] = {}

    def __len__(self) -> int:
        return len(self._arrays)

    def __iter__(self) -> Iterator[Any]:
        return iter([*self._arrays.values()])

    def find(self, salt: Hashable, tokens: list[int]) -> tuple[int, Any]:
        """Return the most first tokens that are cached, and what was computed of them."""
        key = array("i", tokens).tobytes()
        found = (
            self._find_nearest(salt, key) if self.divisible else self._find_whole_prefix(salt, key)
        )
        length = _count_shared_bytes(found, key) // TOKEN_BYTES
        if not length:
            return 0, None
        self._arrays.move_to_end((salt, found))
        return length, self._arrays[salt, found]

    def add(self, salt: Hashable, tokens: list[int], arrays: Any) -> None:
        """Cache what was computed of these tokens. Where prefixes are divisible, in place of the
        one that the tokens begin with, and unless another begins with them."""
        key = array("i", tokens).tobytes()
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
        """Drop the least recently used; return what it held."""
        return self._drop(*next(iter(self._arrays)))

    def clear(self) -> None:
        """Drop all."""
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
        """Return the one that shares most with `key`: it is beside its place."""
        keys = self._sorted.get(salt, [])
        index = bisect(keys, key)
        near = keys[max(0, index - 1) : index + 1]
        return max(near, key=lambda each: _count_shared_bytes(each, key), default=b"")

    def _find_whole_prefix(self, salt: Hashable, key: bytes) -> bytes:
        """Return the longest that `key` begins with."""
        keys = self._sorted.get(salt, [])
        while index := bisect(keys, key):  # it is the one before the key's place, or shorter
            before = keys[index - 1]
            length = _count_shared_bytes(before, key)
            if length == len(before):
                return before
            key = key[:length]
        return b""


def _count_bytes(arrays: Sequence[Any]) -> int:
    return sum(x.nbytes for x in arrays)


def _count_shared_bytes(one: bytes, other: bytes) -> int:
    """Return how many first bytes two keys share, of whole tokens."""
    max_tokens = min(len(one), len(other)) // TOKEN_BYTES
    a, b = (np.frombuffer(x, np.int32, max_tokens) for x in (one, other))
    different = a != b
    first = int(different.argmax()) if max_tokens else 0
    return TOKEN_BYTES * (first if max_tokens and different[first] else max_tokens)


def count_shared_tokens(one: list[int], other: list[int]) -> int:
    """Return how many first tokens two sequences share."""
    low, high = 0, min(len(one), len(other)) + 1  # so many are shared; so many are not
    middle = high - 1
    while low + 1 < high:
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
        middle = (low + high) // 2
    return low
