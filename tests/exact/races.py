"""Coupled mode's noise integrated out: all the ways in which the real races can end.

Which id has the least E_i / law_i depends only on the direction of the noise E, and the direction
of exponential noise is uniform on the simplex. There every distribution cuts straight pieces, one
for each winner, whose areas are the probabilities. A world knows of every position the piece that
its noise lies in, and each race run there divides it further; the real race is run at a point
inside.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from exact.worlds import World
from foretoken.sampling.draw import SharedDraw
from foretoken.sampling.keys import SequenceKey

V = 3  # ids: the simplex is a triangle
EMPTY = 1e-15  # area below which a piece is rounding

Won = tuple[tuple[float, ...], int]  # a distribution, and the id that won by it
Piece = np.ndarray  # [corners, V]: a convex polygon, in order


@lru_cache(None)
def piece(races: tuple[Won, ...]) -> Piece:
    """The directions of the noise with which all these races end so."""
    if not races:
        return np.eye(V)
    *before, (distribution, x) = races
    corners = piece(tuple(before))
    for j in range(V):  # E_x / law_x <= E_j / law_j
        corners = half(corners, distribution[x] * np.eye(V)[j] - distribution[j] * np.eye(V)[x])
    return corners


def half(corners: Piece, normal: np.ndarray) -> Piece:
    """The part of a polygon on the positive side of a line through the simplex."""
    kept = []
    for a, b in zip(corners, np.roll(corners, -1, 0), strict=True):
        above, below = a @ normal, b @ normal
        if above >= 0:
            kept.append(a)
        if above * below < 0:
            kept.append((above * b - below * a) / (above - below))
    return np.array(kept).reshape(-1, V)


@lru_cache(None)
def area(races: tuple[Won, ...]) -> float:
    """Of a piece, the simplex having 1: the probability that all these races end so."""
    corners = piece(races)
    fans = zip(corners[1:-1], corners[2:], strict=True) if len(corners) > 2 else ()
    return sum(abs(float(np.linalg.det([corners[0], a, b]))) for a, b in fans)


class Race(SharedDraw):
    """The real draw of coupled mode; row b belongs to world `key.seed` of the wave at hand."""

    wave: list[World]

    def find_winners(self, distributions: Tensor, first: int = 0) -> Tensor:
        for i, rows in enumerate(distributions.unbind(1), first):
            for (key, position), distribution in zip(
                self._noise_positions(i), rows.tolist(), strict=True
            ):
                self._run(key, position, tuple(distribution))
        self._noise = {}  # the pieces are smaller now
        return super().find_winners(distributions, first)

    def _run(self, key: SequenceKey, position: int, distribution: tuple[float, ...]) -> None:
        ran = self._ran(key, position)
        areas = [area((*ran, (distribution, x))) for x in range(V)]
        name = key.number, position, distribution
        self.wave[key.seed].take(name, [a if a > EMPTY else 0.0 for a in areas])

    def _ran(self, key: SequenceKey, position: int) -> tuple[Won, ...]:
        """What is known of the noise of a position."""
        path, place = self.wave[key.seed].path, (key.number, position)
        return tuple((name[2], x) for name, (x, _) in path.items() if name[:2] == place)

    def _exponentials(self, offset: int, V: int) -> Tensor:
        points = [piece(self._ran(*place)).mean(0) for place in self._noise_positions(offset)]
        return torch.from_numpy(np.stack(points))
