"""Finds weights that are already quantized in blocks, like the weights of GGUF files, so that a
backend can store the weights as integers: the same numbers in a quarter of the memory.

A block is 32 or 16 weights of one output. Each weight is k * scale + offset with an integer k of
four or eight bits; most formats have no offset. Blocks are recognised by their values alone, bit
for bit, and not by the format's name, so that a weight with reordered rows is recognised too. Other
weights are left unchanged: nothing is ever rounded.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

Floats = NDArray[np.float32]
ScaleChoices = NDArray[np.int64]
BLOCK_SIZES = (32, 16)
NUM_SAMPLE_BLOCKS = 16  # tried first: is the weight quantized, and with which scales?
MAX_REST_SHARE = 0.5  # maximum share of blocks that fit none of the choices that sample blocks fit
BLOCKS_PER_TASK = 2**14  # blocks per task of a thread
SIGNIFICANT_BITS = 19  # of a scale or an offset, which is a float16 number times an integer


@dataclass(frozen=True, slots=True)
class QuantizedBlocks:
    """A weight `[out, in]` in blocks of `size` weights: integers `[out, in / size, size]`, and for
    each block a scale and an offset, `[out, in / size, 1]`."""

    integers: NDArray[np.int8]
    scales: Floats
    offsets: Floats | None

    @property
    def bits(self) -> int:
        low, high = self.integers.min(), self.integers.max()
        return 4 if (low >= -8 and high <= 7) or (low >= 0 and high <= 15) else 8


def find_blocks(weight: Floats) -> QuantizedBlocks | None:
    """Return the blocks of a weight `[out, in]`; None if the weight is not quantized in blocks.

    Example:
        >>> weight = np.tile(np.arange(-8, 8, dtype=np.float32), (1, 4)) * np.float32(0.375)
        >>> find_blocks(weight).scales.ravel()
        array([0.375, 0.375], dtype=float32)
    """
    out, inner = weight.shape
    for size in BLOCK_SIZES if np.isfinite(weight).all() else ():
        groups = weight.reshape(-1, size) if inner % size == 0 else weight[:0]
        for form, choices in BLOCK_FORMS if groups.size else ():
            if (flat := _fit_all(groups, form, choices)) is not None:
                shape = out, inner // size, -1
                k, scales = flat.integers.reshape(shape), flat.scales.reshape(shape)
                offsets = None if flat.offsets is None else flat.offsets.reshape(shape)
                return QuantizedBlocks(k, scales, offsets)
    return None


def map_parts(function: Callable[[int, int], Any], n: int, size: int) -> list[Any]:
    """Split [0, n) into ranges [i, j) of `size` and return function(i, j) for each range, computed
    on all threads."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(lambda i: function(i, min(n, i + size)), range(0, n, size)))


def _compute_scales(groups: Floats, n: ScaleChoices) -> tuple[Floats, Floats]:
    """Return, for each choice n, the scales of groups `[groups, size]`, and offsets of 0. The
    weight of largest magnitude in a group is -n times the scale."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    scales = peak / -n.astype(np.float32)[:, None, None]
    return scales, np.zeros_like(scales)


@np.errstate(over="ignore", invalid="ignore")
def _compute_scales_and_offsets(groups: Floats, choices: ScaleChoices) -> tuple[Floats, Floats]:
    """Return, for each choice (span, low), the scales and offsets of groups `[groups, size]`: the
    smallest weight of a group gets the integer `low`, and the largest weight gets `low` +
    `span`."""
    span, low = np.moveaxis(choices.astype(np.float64), -1, 0)[..., None, None]
    first, last = groups.min(1)[:, None].astype(np.float64), groups.max(1)[:, None]
    scales = _round_to_significant((last - first) / span)
    return scales.astype(np.float32), _round_to_significant(first - scales * low).astype(np.float32)


def _list_spans(max_integer: int) -> ScaleChoices:
    """Return all pairs (span, low) for which no integer exceeds `max_integer`."""
    return np.array(
        [(s, low) for s in range(max_integer, 0, -1) for low in range(max_integer + 1 - s)]
    )


BLOCK_FORMS = (  # 4-bit integers; MXFP4; 8 bits; 4 bits with offsets; 5 bits with offsets
    (_compute_scales, np.arange(1, 9)),
    (_compute_scales, np.array([12, 8, 6])),
    (_compute_scales, np.arange(1, 128)),
    (_compute_scales_and_offsets, _list_spans(15)),
    (_compute_scales_and_offsets, _list_spans(31)),
)


def _round_to_significant(values: NDArray[np.float64]) -> NDArray[np.float64]:
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 2**SIGNIFICANT_BITS), exponent - SIGNIFICANT_BITS)


@np.errstate(over="ignore", invalid="ignore")
def _fit_integers(
    groups: Floats, scales: Floats, offsets: Floats
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """Return the integers that represent groups `[n, size]` best with these scales and offsets
    `[..., n, 1]`, and, for each group, True if the integers reproduce the group's weights bit for
    bit."""
    safe = np.where(scales == 0, 1, scales)
    k = np.rint((groups - offsets) / safe)
    fits = (np.abs(k) <= 127) & (scales * k + offsets == groups)
    return k, fits.all(-1)


def _fit_all(groups: Floats, form: Any, choices: ScaleChoices) -> QuantizedBlocks | None:
    """Return the blocks of all groups `[n, size]`; None if any group does not fit.

    form, choices: a function of `BLOCK_FORMS`, and the choices to try with this function. A sample
    of the groups is tried first. If a sample group fits no choice, the result is None; otherwise
    all groups are tried, first with the choices that fit the most sample groups.
    """
    some = groups[:: -(-len(groups) // NUM_SAMPLE_BLOCKS)]
    fits = _fit_integers(some, *form(some, choices))[1]
    if not fits.any(0).all():
        return None
    hits = fits.sum(1)
    k = np.empty(groups.shape, np.int8)
    scales, offsets = np.zeros((2, len(groups), 1), np.float32)

    def fit_part(first: int, last: int) -> bool:
        left = np.arange(first, last)
        for i in np.argsort(-hits, kind="stable"):
            if hits[i] == 0 and len(left) > MAX_REST_SHARE * (last - first):
                return False
            part = groups[left]
            new_scales, new_offsets = (values[0] for values in form(part, choices[[i]]))
            new, fits = _fit_integers(part, new_scales, new_offsets)
            done = left[fits]
            k[done], scales[done], offsets[done] = new[fits], new_scales[fits], new_offsets[fits]
            left = left[~fits]
            if not left.size:
                return True
        return False

    if not all(map_parts(fit_part, len(groups), BLOCKS_PER_TASK)):
        return None
    return (
        _center_integers(k, scales, offsets)
        if form is _compute_scales_and_offsets
        else QuantizedBlocks(k, scales, None)
    )


def _center_integers(k: NDArray[np.int8], scales: Floats, offsets: Floats) -> QuantizedBlocks:
    """Return the blocks with integers shifted to be centered around zero, if the shifted offsets
    are exact in float32. Products of smaller integers have smaller rounding errors."""
    shift = 8 if k.max() <= 15 else 16
    moved = offsets.astype(np.float64) + shift * scales.astype(np.float64)
    narrow = moved.astype(np.float32)
    exact = bool((narrow == moved).all())
    return (
        QuantizedBlocks(k - np.int8(shift), scales, narrow)
        if exact
        else QuantizedBlocks(k, scales, offsets)
    )
