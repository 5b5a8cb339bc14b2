"""Weights in the form that the kernels read: panels of 16 outputs (`kernels/network.h`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
LANES, WEIGHTS = 16, 32  # outputs of a panel; weights of a block along the inputs
KINDS = {"float32": 0, "bfloat16": 1, "int8": 2, "int4": 3}
OFFSETS, WIDE, HALVES = 1, 2, 4  # forms of integers, as in network.h


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight `[outputs, inputs]`; outputs are filled up to a multiple of 16 by zeros."""

    kind: str
    form: int
    outputs: int
    inputs: int
    data: NDArray[np.uint8]


def pack_floats(weight: NDArray[Any], kind: str) -> Panels:
    """Pack numbers `[N, K]`: float32, or bfloat16 given as their upper 16 bits in uint16."""
    rows = _rows(weight)
    panels = rows.reshape(-1, LANES, rows.shape[1]).swapaxes(1, 2)
    return Panels(kind, 0, len(rows), weight.shape[1], _bytes(panels))


def pack_integers(
    integers: NDArray[Any], scales: Floats, offsets: Floats | None, bits: int
) -> Panels:
    """Pack integers `[N, K]`, of which weights are scale * integer + offset.

    Args:
        integers: From 0 to 2**bits - 1 with offsets, else half of that less.
        scales: `[N, blocks]`, of blocks of 32 or 16 weights.
        offsets: `[N, blocks]`, or None.
        bits: 4 or 8 of an integer.
    """
    K, blocks = integers.shape[1], scales.shape[1]
    form = (offsets is not None) * OFFSETS + (blocks > -(-K // WEIGHTS)) * HALVES
    both = [scales] if offsets is None else [scales, offsets]
    with np.errstate(over="ignore"):
        if any((each.astype(np.float16) != each).any() for each in both):
            form += WIDE
    zero = 0 if form & OFFSETS else 2 ** (bits - 1)
    q = (_rows(integers).astype(np.int16) + zero).astype(np.uint8)
    if K % WEIGHTS:  # states are zero there
        q = np.concatenate([q, np.zeros((len(q), -K % WEIGHTS), np.uint8)], 1)
    # [panels, blocks, 32, 16 outputs] as runs of four weights of an output
    q = q.reshape(len(q) // LANES, LANES, -1, WEIGHTS // 4, 4).transpose(0, 2, 3, 1, 4)
    if bits == 4:
        q = q[:, :, :4] | q[:, :, 4:] << 4
    q = q.reshape(*q.shape[:2], -1)
    factors = [_factors(each, form, q.shape[1]) for each in both]
    data = _bytes(np.concatenate([*factors, q], 2))
    return Panels(f"int{bits}", form, len(factors[0]) * LANES, K, data)


def _rows(weight: NDArray[Any]) -> NDArray[Any]:
    """Fill up `[N, K]` to a multiple of 16 rows."""
    missing = -len(weight) % LANES
    return np.concatenate([weight, np.zeros((missing, weight.shape[1]), weight.dtype)])


def _factors(each: Floats, form: int, blocks: int) -> NDArray[np.uint8]:
    """Return `[N, blocks]`, or two in each block of 32, as bytes `[panels, blocks of 32, ..]`."""
    rows = _rows(each.astype(np.float32 if form & WIDE else np.float16))
    if rows.shape[1] % blocks:
        rows = np.concatenate([rows, np.zeros((len(rows), 1), rows.dtype)], 1)
    panels = rows.reshape(len(rows) // LANES, LANES, blocks, -1).transpose(0, 2, 3, 1)
    return _bytes(panels).reshape(len(panels), blocks, -1)


def _bytes(array: NDArray[Any]) -> NDArray[np.uint8]:
    return np.ascontiguousarray(array).view(np.uint8).reshape(-1)
