"""Weights that are blocks of small integers already, as those of GGUF files, so that a runtime can
keep them as they are: the same numbers, in a quarter of the bytes to read.

A block is 32 or 16 weights that flow into one output, each k * scale + offset with an integer k of
four or eight bits; most formats have no offset. Blocks are recognised by their values alone, to the
bit, whatever the format was called and wherever a row was moved since.

Weights that are no such blocks are said to have none. Does not round.
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
Choices = NDArray[np.int64]
SIZES = (32, 16)
SAMPLE = 16  # blocks that tell whether a weight has any, and which candidates are frequent
REST = 0.5  # the share of blocks that the frequent candidates may leave
PART = 2**14  # blocks that a thread fits at a time
EXACT = 19  # significant bits of a scale or an offset: of a number in float16 times an integer


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight `[out, in]`: integers `[out, in / size, size]`, the others `[out, in / size, 1]`."""

    integers: NDArray[np.int8]
    scales: Floats
    offsets: Floats | None

    @property
    def bits(self) -> int:
        low, high = self.integers.min(), self.integers.max()
        return 4 if (low >= -8 and high <= 7) or (low >= 0 and high <= 15) else 8


def found(weight: Floats) -> Blocks | None:
    """Return the blocks that a weight `[out, in]` consists of, or None.

    Example:
        >>> weight = np.tile(np.arange(-8, 8, dtype=np.float32), (1, 4)) * np.float32(0.375)
        >>> found(weight).scales.ravel()
        array([0.375, 0.375], dtype=float32)
    """
    out, inner = weight.shape
    for size in SIZES if np.isfinite(weight).all() else ():
        groups = weight.reshape(-1, size) if inner % size == 0 else weight[:0]
        for form, choices in FORMS if groups.size else ():
            if (flat := _fitted(groups, form, choices)) is not None:
                shape = out, inner // size, -1
                k, scales = flat.integers.reshape(shape), flat.scales.reshape(shape)
                offsets = None if flat.offsets is None else flat.offsets.reshape(shape)
                return Blocks(k, scales, offsets)
    return None


def in_parts(work: Callable[[int, int], Any], n: int, size: int) -> list[Any]:
    """Return what work(i, j) gives over all parts of `size` of n, on all threads."""
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:
        return list(threads.map(lambda i: work(i, min(n, i + size)), range(0, n, size)))


def _multiples(groups: Floats, n: Choices) -> tuple[Floats, Floats]:
    """Scales without offsets: the largest weight is -n times the scale."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    scales = peak / -n.astype(np.float32)[:, None, None]
    return scales, np.zeros_like(scales)


@np.errstate(over="ignore", invalid="ignore")
def _steps(groups: Floats, choices: Choices) -> tuple[Floats, Floats]:
    """Scales and offsets: the smallest weight is `low` scales above the offset, and the largest
    `span` above it."""
    span, low = np.moveaxis(choices.astype(np.float64), -1, 0)[..., None, None]
    first, last = groups.min(1)[:, None].astype(np.float64), groups.max(1)[:, None]
    scales = _shortened((last - first) / span)
    return scales.astype(np.float32), _shortened(first - scales * low).astype(np.float32)


def _spans(most: int) -> Choices:
    """All pairs of a span and a low whose integers are at most this."""
    return np.array([(s, low) for s in range(most, 0, -1) for low in range(most + 1 - s)])


FORMS = (  # four bits first, then the largest numbers of MXFP4; a span of 31 has five
    (_multiples, np.arange(1, 9)),
    (_multiples, np.array([12, 8, 6])),
    (_multiples, np.arange(1, 128)),
    (_steps, _spans(15)),
    (_steps, _spans(31)),
)


def _shortened(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest numbers of `EXACT` significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 2**EXACT), exponent - EXACT)


@np.errstate(over="ignore", invalid="ignore")
def _fit(
    groups: Floats, scales: Floats, offsets: Floats
) -> tuple[NDArray[np.float32], NDArray[np.bool_]]:
    """The integers of groups `[n, size]`, and which groups are blocks of them to the bit; scales
    and offsets `[..., n, 1]`."""
    safe = np.where(scales == 0, 1, scales)
    k = np.rint((groups - offsets) / safe)
    fits = (np.abs(k) <= 127) & (scales * k + offsets == groups)
    return k, fits.all(-1)


def _fitted(groups: Floats, form: Any, choices: Choices) -> Blocks | None:
    """The blocks of all groups `[n, size]`; None where one is no block.

    A sample tells for an ordinary weight. Choices are tried by how often they fit in it.
    """
    some = groups[:: -(-len(groups) // SAMPLE)]
    fits = _fit(some, *form(some, choices))[1]
    if not fits.any(0).all():
        return None
    hits = fits.sum(1)
    k = np.empty(groups.shape, np.int8)
    scales, offsets = np.zeros((2, len(groups), 1), np.float32)

    def fit_part(first: int, last: int) -> bool:
        left = np.arange(first, last)
        for i in np.argsort(-hits, kind="stable"):
            if hits[i] == 0 and len(left) > REST * (last - first):
                return False
            part = groups[left]
            new_scales, new_offsets = (values[0] for values in form(part, choices[[i]]))
            new, fits = _fit(part, new_scales, new_offsets)
            done = left[fits]
            k[done], scales[done], offsets[done] = new[fits], new_scales[fits], new_offsets[fits]
            left = left[~fits]
            if not left.size:
                return True
        return False

    if not all(in_parts(fit_part, len(groups), PART)):
        return None
    return _centred(k, scales, offsets) if form is _steps else Blocks(k, scales, None)


def _centred(k: NDArray[np.int8], scales: Floats, offsets: Floats) -> Blocks:
    """The same with integers around zero, where the offsets stay exact: their product then is of
    smaller numbers, and rounds less."""
    shift = 8 if k.max() <= 15 else 16
    moved = offsets.astype(np.float64) + shift * scales.astype(np.float64)
    narrow = moved.astype(np.float32)
    exact = bool((narrow == moved).all())
    return Blocks(k - np.int8(shift), scales, narrow) if exact else Blocks(k, scales, offsets)
