"""Cosines and sines of rotary positions: the same on every machine."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

# pi / 2 in parts of few bits, so that products with whole numbers below 2**20 are exact
PARTS = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
GROWTH = 1024  # positions that are added at least
Floats = NDArray[np.float32]


def cosine_and_sine(angles: NDArray[np.float64]) -> tuple[Floats, Floats]:
    """Return cosines and sines, by products and sums alone, which every processor rounds alike."""
    quarter = np.rint(angles * (2 / np.pi))
    rest = ((angles - quarter * PARTS[0]) - quarter * PARTS[1]) - quarter * PARTS[2]
    square = rest * rest
    sine, cosine = np.ones_like(rest), np.ones_like(rest)
    for n in range(16, 0, -2):  # Taylor's series: 3e-17 off at pi / 4
        sine = 1 - square / (n * (n + 1)) * sine
        cosine = 1 - square / (n * (n - 1)) * cosine
    sine = rest * sine
    turn = quarter.astype(np.int64) & 3
    swapped, negative = turn & 1 == 1, (turn + 1) & 2 == 2
    cosines = np.where(swapped, sine, cosine) * np.where(negative, -1, 1)
    sines = np.where(swapped, cosine, sine) * np.where(turn & 2 == 2, -1, 1)
    return cosines.astype(np.float32), sines.astype(np.float32)


class Turns:
    """The rotary positions of one kind: a table that grows."""

    def __init__(self, rope: dict[str, Any]) -> None:
        self.frequencies = np.array(rope["frequencies"], np.float32)
        self.scale, self.growth = np.float32(rope["scale"]), rope["growth"]
        self.table: Floats = np.zeros((0, 2 * len(self.frequencies)), np.float32)

    def at(self, positions: NDArray[np.int32], last: int) -> Floats:
        """Return cosines, then sines, `[n, rotated]` at positions, none beyond `last`."""
        if last >= len(self.table):
            places = np.arange(max(last + 1, 2 * len(self.table), GROWTH), dtype=np.float32)
            # in float32, as transformers multiplies
            angles = (places[:, None] * self.frequencies).astype(np.float64)
            cosines, sines = cosine_and_sine(angles)
            scale: Any = self.scale
            if self.growth is not None:
                slope, length = self.growth
                logs = [math.log(1 + i) for i in range(len(places) // length + 1)]
                grown = 1 + slope * np.array(logs)[places.astype(int) // length, None]
                scale = scale * grown.astype(np.float32)
            self.table = np.concatenate([cosines * scale, sines * scale], 1)
        return self.table[positions]
