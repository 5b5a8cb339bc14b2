"""Keys and values of rows on ONNX Runtime: an array `[rows, heads, slots, width]` for each layer's
keys and one for its values, read and written in place; and those of texts that have left, kept for
others that begin alike. Knows no graphs."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from math import prod

import numpy as np

from foretoken.models.blocks import Floats
from foretoken.models.rows import Places

Shape = tuple[int, int]  # heads and width


class KeySlots(Places):
    """Rows with room for more rows, and more tokens, than there are. Untouched room is free: the
    system gives memory where it is written to."""

    unit = 256
    is_initialized = True

    def __init__(self, shapes: list[Shape]) -> None:
        self.lengths, self.places = [], []
        self.rows, self.capacity = 0, 0
        self.arrays: list[Floats] = [np.zeros((0, h, 0, w), np.float32) for h, w in shapes * 2]

    @property
    def token_bytes(self) -> int:
        return sum(x.itemsize * x.shape[1] * x.shape[3] for x in self.arrays)

    def parts(self) -> list[KeySlots]:
        return [self]

    def fit(self, like: list[Floats], rows: int, capacity: int, used: int) -> None:
        bigger = [np.zeros((rows, x.shape[1], capacity, x.shape[3]), np.float32) for x in like]
        slots = min(capacity, self.capacity)
        for new, old in zip(bigger, like, strict=True):
            new[:used, :, :slots] = old[:used, :, :slots]
        self.arrays = bigger

    def put(self, place: int, row: list[Floats]) -> None:
        for x, new in zip(self.arrays, row, strict=True):
            x[place, :, : new.shape[1]] = new

    def row(self, place: int, slots: int) -> list[Floats]:
        return [x[place, :, :slots] for x in self.arrays]


@dataclass(frozen=True, slots=True)
class KeptPrefix:
    """Keys and values of a text's first tokens."""

    salt: Hashable
    tokens: list[int]
    arrays: list[Floats]  # [heads, tokens, width]

    @property
    def bytes(self) -> int:
        return sum(prod(x.shape) * x.itemsize for x in self.arrays)


MOST = 2**29  # bytes that are kept at most
LEAST = 32  # tokens that texts must share


class KeptPrefixes:
    """Texts that have left, the latest last; the oldest give way."""

    def __init__(self) -> None:
        self.texts: list[KeptPrefix] = []

    def keep(self, salt: Hashable, tokens: list[int], arrays: list[Floats]) -> None:
        """Keep a text, in place of those that it begins with."""
        if not valid(arrays):
            return
        new = KeptPrefix(salt, list(tokens), [x.copy() for x in arrays])
        self.texts = [
            text
            for text in self.texts
            if text.salt != salt or shared(text.tokens, tokens) < len(text.tokens)
        ]
        self.texts.append(new)
        total = sum(text.bytes for text in self.texts)
        while total > MOST:
            total -= self.texts.pop(0).bytes

    def find(self, salt: Hashable, tokens: list[int]) -> tuple[int, list[Floats]]:
        """Return how many first tokens a kept text shares with these at most, and its arrays."""
        own = [text for text in self.texts if text.salt == salt]
        counts = [shared(text.tokens, tokens) for text in own]
        best = max(counts, default=0)
        if best < LEAST:
            return 0, []
        return best, [x[:, :best] for x in own[counts.index(best)].arrays]


def valid(arrays: list[Floats]) -> bool:
    """Tell whether there is no NaN or infinity. It spreads from layer to layer, so that the last
    one's keys and values tell."""
    return all(bool(np.isfinite(x).all()) for x in (arrays[len(arrays) // 2 - 1], arrays[-1]))


def shared(one: list[int], other: list[int]) -> int:
    """Return how many first tokens two texts share."""
    most = min(len(one), len(other))
    if one[:most] == other[:most]:
        return most
    same = np.equal(one[:most], other[:most])
    return int(np.argmin(same))
