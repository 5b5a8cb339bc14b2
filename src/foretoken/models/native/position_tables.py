"""Tables by position, which grow with the longest sequence: cosines and sines of rotary position
embeddings, bit-identical on every machine, and attention biases by the distance between query and
key (T5)."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.models.native.pages import PAGE_POSITIONS
from foretoken.models.quantized_blocks import Floats

# pi / 2 as a sum of floats with few bits, whose products with integers below 2**20 are exact
HALF_PI_PARTS = (1.57079632673412561417, 6.07710050630396597660e-11, 2.02226624879595063154e-21)
MIN_ADDED_POSITIONS = 1024
MIN_ADDED_DISTANCES = 512


def compute_cosine_and_sine(angles: NDArray[np.float64]) -> tuple[Floats, Floats]:
    """Return the cosines and sines of `angles`. Only products and sums are used, because every
    processor rounds products and sums alike."""
    quarter = np.rint(angles * (2 / np.pi))
    rest = (
        (angles - quarter * HALF_PI_PARTS[0]) - quarter * HALF_PI_PARTS[1]
    ) - quarter * HALF_PI_PARTS[2]
    square = rest * rest
    sine, cosine = np.ones_like(rest), np.ones_like(rest)
    for n in range(16, 0, -2):  # Taylor's series: its error at pi / 4 is 3e-17
        sine = 1 - square / (n * (n + 1)) * sine
        cosine = 1 - square / (n * (n - 1)) * cosine
    sine = rest * sine
    turn = quarter.astype(np.int64) & 3
    swapped, negative = turn & 1 == 1, (turn + 1) & 2 == 2
    cosines = np.where(swapped, sine, cosine) * np.where(negative, -1, 1)
    sines = np.where(swapped, cosine, sine) * np.where(turn & 2 == 2, -1, 1)
    return cosines.astype(np.float32), sines.astype(np.float32)


class RotaryTable:
    """The cosines, then the sines, of rotary positions: a table `[kinds, capacity, 2 * pairs]`. If
    there are two kinds, kind 0 is for short sequences and kind 1 for long ones; otherwise kind 0 is
    for all sequences."""

    def __init__(self, rope: dict[str, Any]) -> None:
        self.kinds = [
            (np.array(kind["frequencies"], np.float32), np.float32(kind["scale"]))
            for kind in (rope, *([rope["long"]] if rope.get("long") else ()))
        ]
        self.growth = rope["growth"]
        self.table: Floats = np.zeros((len(self.kinds), 0, 2 * len(self.kinds[0][0])), np.float32)

    @property
    def capacity(self) -> int:
        """Return the number of positions in the table."""
        return self.table.shape[1]

    def reserve(self, positions: int) -> None:
        """Extend the table to at least this many positions. Its memory address may change."""
        if positions <= self.capacity:
            return
        capacity = max(positions, 2 * self.capacity, MIN_ADDED_POSITIONS)
        new = np.arange(self.capacity, capacity, dtype=np.float32)[:, None]
        more: list[Floats] = []
        for frequencies, scale in self.kinds:
            # the product in float32, as in transformers
            parts = compute_cosine_and_sine((new * frequencies).astype(np.float64))
            more.append(
                np.concatenate([part * scale * self._compute_growth(new) for part in parts], 1)
            )
        self.table = np.concatenate([self.table, more], 1)

    def gather_rows(self, positions: NDArray[np.int64], axes: list[int]) -> Floats:
        """Return table rows `[n, 2 * pairs]` for n tokens. Pair i of a head is rotated by the
        position on axis axes[i]. positions: the tokens' positions on each axis, `[axes, n]`."""
        position_ids = positions[np.array(axes)].T  # [n, pairs]
        pairs = np.arange(len(axes))
        table = self.table[0]
        return np.concatenate(
            [table[position_ids, pairs], table[position_ids, pairs + len(axes)]], 1
        )

    def _compute_growth(self, positions: Floats) -> Floats:
        """Return the factors that scale queries at positions `[n, 1]` (`Rope.growth`). The caller
        multiplies the cosines and sines by these factors."""
        if self.growth is None:
            return np.ones((1, 1), np.float32)
        slope, length = self.growth
        steps = positions.astype(int) // length
        logs = np.array([math.log(1 + i) for i in range(int(steps.max()) + 1)])
        return (1 + slope * logs[steps]).astype(np.float32)


class DistanceBiases:
    """Attention biases by distance, as tables `[heads, 2 * reach]`. Entry `reach + d` of a head is
    added to the score of a key that is d positions after the query.

    Args:
        tables: The network's tables, `[heads, 2 * m + 1]` each, for distances from -m to m. Greater
            distances have the bias of distance m or -m.
    """

    def __init__(self, tables: list[Floats]) -> None:
        self._learned = tables
        self.reach = 0
        self.tables: list[Floats] = []

    def reserve(self, positions: int) -> None:
        """Extend the tables to at least this many positions, and one page more: the kernels also
        score the unused positions of a sequence's last page. The tables' memory addresses may
        change."""
        if not self._learned or positions + PAGE_POSITIONS <= self.reach:
            return
        reach = max(positions + PAGE_POSITIONS, 2 * self.reach, MIN_ADDED_DISTANCES)
        distances, tables = np.arange(-reach, reach), list[Floats]()
        for learned in self._learned:
            max_distance = learned.shape[1] // 2
            tables.append(
                np.ascontiguousarray(
                    learned[:, distances.clip(-max_distance, max_distance) + max_distance]
                )
            )
        self.reach, self.tables = reach, tables
