"""Biases of attention by the distance between query and key, as T5 learns them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from foretoken.models.native.pages import PAGE

GROWTH = 512  # distances that are added at least


class DistanceBiases:
    """Tables by distance, `[heads, 2 * reach]` each: number `reach + d` is added to the score of a
    key d positions after the query.

    Args:
        tables: The tables of the network, `[heads, 2 * most + 1]` each, by distances from -most to
            most; further ones have the bias of the furthest one.
    """

    def __init__(self, tables: list[NDArray[np.float32]]) -> None:
        self._known = tables
        self.reach = 0
        self.tables: list[NDArray[np.float32]] = []

    def reserve(self, positions: int) -> None:
        """Make tables for rows of so many positions, and what lies behind them in their last page;
        they may move."""
        if not self._known or positions + PAGE <= self.reach:
            return
        reach = max(positions + PAGE, 2 * self.reach, GROWTH)
        distances, tables = np.arange(-reach, reach), list[NDArray[np.float32]]()
        for known in self._known:
            most = known.shape[1] // 2
            tables.append(np.ascontiguousarray(known[:, distances.clip(-most, most) + most]))
        self.reach, self.tables = reach, tables
