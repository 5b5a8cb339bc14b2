"""Scales of two levels, as K kinds of GGUF files have them: each a small integer times the float16
of a super-block of 256 weights. They are recovered from the scales alone (`models.blocks`), to the
bit; a block whose weights several scales make gets the one that its super-block has."""

from __future__ import annotations

from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.models.blocks import Floats

SUPER_BLOCK = 256
# What the largest factor of a super-block may be: those that files have come first, then others
# before those that divide them
LARGEST = (-128, 63, *range(127, 0, -1))
SAMPLE = 64  # super-blocks of which most must have a common factor


class TwoLevels(NamedTuple):
    """Integers `[blocks, size]`; scales, and offsets if there are some, as factors `[blocks]` in
    int8; and what these are multiples of, a number in float16 for each super-block."""

    integers: NDArray[np.int8]
    factors: list[NDArray[np.int8]]
    supers: list[NDArray[np.float16]]


def two_levels(
    integers: NDArray[np.int8], parts: list[Floats], low: int, high: int
) -> TwoLevels | None:
    """Divide scales, and offsets if there are some, `[blocks]` each, of integers `[blocks, size]`,
    which are to stay from `low` to `high`; None where they have no two levels."""
    blocks = SUPER_BLOCK // integers.shape[1]
    supers = [common_factor(x.reshape(-1, blocks)) for x in parts]
    if any(x is None for x in supers):
        return None
    each = [np.repeat(x, blocks) for x in supers if x is not None]
    fits = [_divided(x, d)[1] for x, d in zip(parts, each, strict=True)]
    wrong = np.flatnonzero(~np.logical_and.reduce(fits))
    if wrong.size:
        some = [x[wrong] for x in parts]
        mended = _mended(integers[wrong], some, [d[wrong] for d in each], low, high)
        if mended is None:
            return None
        integers, parts = integers.copy(), [x.copy() for x in parts]
        for whole, part in zip((integers, *parts), mended, strict=True):
            whole[wrong] = part
    factors = [_divided(x, d)[0].astype(np.int8) for x, d in zip(parts, each, strict=True)]
    return TwoLevels(integers, factors, [x.astype(np.float16) for x in supers if x is not None])


def common_factor(x: Floats) -> Floats | None:
    """Return a number in float16 for each row of `[n, factors]`, of which most of these are
    multiples by an int8; None where most rows have none."""
    if len(x) > SAMPLE and common_factor(x[:: len(x) // SAMPLE][:SAMPLE]) is None:
        return None
    best, most = np.zeros(len(x), np.float32), np.zeros(len(x), np.int64)
    ordered, left = np.argsort(-np.abs(x), axis=1)[:, :2], np.arange(len(x))
    for place, n in product(range(ordered.shape[1]), LARGEST):
        part = x[left]
        peak = np.take_along_axis(part, ordered[left, place, None], 1)[:, 0]
        with np.errstate(over="ignore"):
            factor = (peak / np.float32(n)).astype(np.float16).astype(np.float32)
        count = _divided(part, factor[:, None])[1].sum(1)
        better = count > most[left]
        best[left[better]], most[left[better]] = factor[better], count[better]
        left = left[count < x.shape[1]]
        if not left.size:
            break
    return best if (most * 2 > x.shape[1]).mean() >= 0.5 else None


def _divided(x: Floats, factor: Floats) -> tuple[Any, Any]:
    """Return what x is of a factor, in whole numbers, and whether it is so exactly, in int8."""
    with np.errstate(all="ignore"):
        k = np.rint(np.where(x == 0, 0, x / factor))
        return k, (k * factor == x) & (k >= -128) & (k <= 127) | (x == 0)


def _mended(
    whole: NDArray[np.int8], parts: list[Floats], supers: list[Floats], low: int, high: int
) -> list[Any] | None:
    """Return integers, scales and offsets that make the same weights with scales and offsets that
    are multiples of `supers`; None where there are none."""
    first, scales = whole.astype(np.float64), parts[0].astype(np.float64)[:, None]
    offsets = parts[1].astype(np.float64)[:, None] if len(parts) > 1 else np.zeros_like(scales)
    weights = (first * scales + offsets).astype(np.float32)
    start = first.min(1, keepdims=True) * (len(parts) > 1)
    step = np.gcd.reduce((first - start).astype(np.int64), axis=1)[:, None]
    step = np.where(step == 0, 1, step)
    integers, offsets, scales = (first - start) / step, offsets + scales * start, scales * step
    made, left = [x.copy() for x in (whole, *parts)], np.arange(len(first))
    shifts = range(low, high + 1) if len(parts) > 1 else [0]
    for times, shift in product(range(1, high - low + 1), shifts):
        k, scale = integers[left] * times + shift, _nearest(scales[left] / times, supers[0][left])
        new = [scale]
        if len(parts) > 1:
            new.append(_nearest(offsets[left] - scale * shift, supers[1][left]))
        shown = k * scale + (new[1] if len(parts) > 1 else 0)
        right = ((k >= low) & (k <= high) & (shown.astype(np.float32) == weights[left])).all(1)
        for to, x in zip(made, (k, *(x[:, 0] for x in new)), strict=True):
            to[left[right]] = x[right]
        left = left[~right]
        if not left.size:
            return made
    return None


def _nearest(x: Any, factor: Floats) -> Any:
    """Return the nearest multiples `[n, 1]` of a factor, by an int8."""
    with np.errstate(all="ignore"):
        k = np.nan_to_num(np.rint(x / factor[:, None]))
    return np.clip(k, -128, 127) * factor[:, None]
