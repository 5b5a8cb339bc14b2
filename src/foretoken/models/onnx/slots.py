"""Keys and values of rows on ONNX Runtime: an array `[rows, heads, slots, width]` for each layer's
keys and one for its values, read and written in place. Knows no graphs."""

from __future__ import annotations

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


def valid(arrays: list[Floats]) -> bool:
    """Tell whether there is no NaN or infinity. It spreads from layer to layer, so that the last
    one's keys and values tell."""
    return all(bool(np.isfinite(x).all()) for x in (arrays[len(arrays) // 2 - 1], arrays[-1]))
