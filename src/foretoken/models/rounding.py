"""Weights rounded to integers of eight or four bits and their scales."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.models.blocks import Floats

REACHES = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of a group's largest weight that -8 stands for


def whole(
    weight: NDArray[Any], axis: int, bits: int = 8
) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers, and the scales of what lies along an axis."""
    scale = np.abs(weight).max(axis=axis, keepdims=True) / (2 ** (bits - 1) - 1)
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale


def nearest(groups: Floats) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """Integers and scales of weights `[n, GROUP]`."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(1, keepdims=True), 1)
    best: tuple[Any, ...] = ()
    for reach in REACHES:
        first = -np.where(peak == 0, 1, peak) * (reach / 8)
        k = np.clip(np.rint(groups / first), -8, 7)
        squares = (k * k).sum(1, keepdims=True)
        scale = (groups * k).sum(1, keepdims=True) / np.maximum(squares, 1)
        scale = scale.astype(np.float16)
        error = ((groups - scale.astype(np.float32) * k) ** 2).sum(1, keepdims=True)
        new = error, k, scale
        better = error < best[0] if best else np.full_like(error, True, bool)
        best = tuple(np.where(better, x, y) for x, y in zip(new, best or new, strict=True))
    return best[1].astype(np.int8), best[2]
