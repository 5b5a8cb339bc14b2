"""Arrays that models computed of sequences that have left, for others that begin with the same
tokens: which belong to which tokens, the longest prefix in common, and what gives way.

It does not know what the arrays mean: a model puts them in and copies them out.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any, NamedTuple

import numpy as np


class Prefix(NamedTuple):
    """The tokens of a sequence, and arrays, of numpy or torch, that were computed from them."""

    salt: Hashable  # sequences of another salt share nothing
    tokens: list[int]
    arrays: list[Any]

    @property
    def bytes(self) -> int:
        return sum(x.nbytes for x in self.arrays)


class PrefixCache:
    """Prefixes of at most `limit` bytes together; the least recently used give way.

    divisible: a prefix also serves sequences that begin with a part of its tokens, as keys and
    values do and states do not.
    """

    def __init__(self, limit: int, *, divisible: bool) -> None:
        self.limit, self.divisible = limit, divisible
        self.prefixes: list[Prefix] = []  # the last used last

    def find(self, salt: Hashable, tokens: list[int]) -> tuple[int, list[Any]]:
        """Return the most first tokens that are cached, and the arrays that hold them."""
        best, found = 0, None
        for prefix in self.prefixes:
            length = shared(prefix.tokens, tokens) if prefix.salt == salt else 0
            if length > best and (self.divisible or length == len(prefix.tokens)):
                best, found = length, prefix
        if found is None:
            return 0, []
        self.prefixes = [prefix for prefix in self.prefixes if prefix is not found] + [found]
        return best, found.arrays

    def add(self, salt: Hashable, tokens: list[int], arrays: list[Any]) -> None:
        """Cache arrays of these tokens; where prefixes are divisible, in place of those that the
        tokens begin with."""
        if self.divisible:
            self.prefixes = [
                prefix
                for prefix in self.prefixes
                if prefix.salt != salt or shared(prefix.tokens, tokens) < len(prefix.tokens)
            ]
        self.prefixes.append(Prefix(salt, tokens, arrays))
        total = sum(prefix.bytes for prefix in self.prefixes)
        while total > self.limit:
            total -= self.prefixes.pop(0).bytes


def shared(one: list[int], other: list[int]) -> int:
    """Return how many first tokens two sequences share."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    return int(np.argmin(np.equal(one[:most], other[:most])))
