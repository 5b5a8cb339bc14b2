"""Packs weights for the kernels, in panels of 16 outputs (see `kernels/cpp/network.h`)."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.kernels import library
from foretoken.models.quantized_blocks import Floats, QuantizedBlocks, find_blocks, map_parts

# outputs in a panel; weights in a quantized block, all of one output
LANES, BLOCK_WEIGHTS = 16, 32
STORAGE_KINDS = {
    "float32": 0,
    "bfloat16": 1,
    "float16": 2,
    "int8": 3,
    "int6": 4,
    "int5": 5,
    "int4": 6,
}
STORAGE_KINDS |= {"code4": 7, "fp4": 8}
FORM_OFFSETS, FORM_WIDE, FORM_HALVES, FORM_SUPER = 1, 2, 4, 8  # forms of integers, as in network.h
# The integers of the 16 codes of IQ4_NL and IQ4_XS, and of MXFP4 (E2M1, doubled)
CODEBOOKS = {
    "code4": (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113),
    "fp4": (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12),
}
SUPER_BLOCK_WEIGHTS = 256
# Candidates for the int8 that stands for a super-block's largest factor: the usual integers of GGUF
# files, then all others in descending order, so that an integer is tried before its divisors
MAX_FACTOR_CANDIDATES = (-128, 63, *range(127, 0, -1))
NUM_SAMPLE_SUPER_BLOCKS = 64  # most of a sample must have a common factor
NUM_BIT_SAMPLE_BLOCKS = 4096  # sample size for estimating how many bits most blocks need
NUMBERS_PER_TASK = 2**19  # numbers that one thread packs or rounds at a time


@dataclass(frozen=True, slots=True)
class Panels:
    """A packed weight `[outputs, inputs]`, whose outputs are padded with zeros to a multiple of 16.
    `kind` is one of STORAGE_KINDS; `form` has the flags FORM_*."""

    kind: str
    form: int
    outputs: int
    inputs: int
    data: NDArray[np.uint8]


def pack(weight: Floats, bits: int, *, rounding: bool = True) -> Panels:
    """Return a packed weight. If the weight was quantized in blocks of at most `bits` bits, these
    blocks are stored without loss. Any other weight is rounded to `bits` bits.

    rounding: If False, any other weight is stored without loss instead: as 16-bit floats if they
    represent it exactly, else as float32.
    """
    blocks = find_blocks(weight)
    if blocks is not None:
        if blocks.bits == 8 and (coded := _pack_codes(blocks, weight.shape)) is not None:
            return coded
        if blocks.bits <= bits:
            return _pack_blocks(blocks, weight.shape)
    if rounding and weight.shape[1] % BLOCK_WEIGHTS == 0:
        return _pack_blocks(round_blocks(weight, bits), weight.shape)
    halves = np.ascontiguousarray(weight).view(np.uint16)  # lower, then upper half
    if not halves[:, ::2].any():
        return pack_floats(halves[:, 1::2], "bfloat16")
    with np.errstate(over="ignore"):
        short = weight.astype(np.float16)
    if (short == weight).all():
        return pack_floats(short, "float16")
    return pack_floats(weight, "float32")


def round_blocks(weight: Floats, bits: int) -> QuantizedBlocks:
    """Return a weight `[out, in]` rounded to 8 or 4 bits, in blocks of 32."""
    blocks, name = weight.size // BLOCK_WEIGHTS, library.choose_instruction_set().encode()
    groups = np.ascontiguousarray(weight).reshape(blocks, BLOCK_WEIGHTS)
    integers, scales = np.empty(groups.shape, np.int8), np.empty((blocks, 1), np.float32)

    def round_part(i: int, j: int) -> None:
        if bits == 8:
            integers[i:j], scales[i:j] = _round_to_int8(groups[i:j])
        else:
            arrays = groups[i:j], integers[i:j], scales[i:j]
            first, *made = (each.ctypes.data for each in arrays)
            library.load_library().foretoken_round_weights(name, first, j - i, *made)

    map_parts(round_part, blocks, NUMBERS_PER_TASK // BLOCK_WEIGHTS)
    shape = len(weight), -1
    return QuantizedBlocks(integers.reshape(*shape, BLOCK_WEIGHTS), scales.reshape(*shape, 1), None)


def _round_to_int8(groups: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Round blocks `[blocks, 32]` to int8; return integers and scales. Scales are rounded to
    float16, unless that would make them subnormal or infinite."""
    best = np.maximum(groups.max(1, keepdims=True), -groups.min(1, keepdims=True)) / np.float32(127)
    with np.errstate(over="ignore"):
        short = best.astype(np.float16).astype(np.float32)
    scale = np.where(np.abs(short - best) <= best * np.float32(2**-11), short, best)
    inverse = groups / np.where(scale > 0, scale, np.float32(1))
    return np.clip(np.rint(inverse), -127, 127).astype(np.int8), scale


def _pack_blocks(blocks: QuantizedBlocks, shape: tuple[int, ...]) -> Panels:
    integers, scales, offsets = blocks.integers, blocks.scales, blocks.offsets
    if offsets is None:
        integers, scales = _reduce_integers(integers, scales)
        low, high = int(integers.min()), int(integers.max())
        bits = next(b for b in (4, 5, 6, 8) if -(2 ** (b - 1)) <= low and high < 2 ** (b - 1))
        limits = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    else:
        # shift the integers so that they begin at 0, and change the offsets accordingly
        low, high = int(integers.min()), int(integers.max())
        low = 0 if low >= 0 else -8 if low >= -8 and high < 8 else -16
        integers, offsets = integers - np.int8(low), offsets + scales * np.float32(low)
        bits = next(b for b in (4, 5, 6, 8) if high - low < 2**b)
        limits = 0, 2**bits - 1
    factors = [scales] if offsets is None else [scales, offsets]
    return _pack_levels(integers, factors, f"int{bits}", limits, shape)


def _pack_codes(blocks: QuantizedBlocks, shape: tuple[int, ...]) -> Panels | None:
    """Pack blocks as codes of four bits; return None unless one of CODEBOOKS has all of the blocks'
    integers."""
    if blocks.offsets is None and blocks.integers.max() <= max(CODEBOOKS["fp4"]):
        blocks = _remove_nines(blocks)
    for kind, integers in CODEBOOKS.items() if blocks.offsets is None else ():
        codes = np.full(256, -1, np.int8)
        codes[np.array(integers[::-1], np.int8).view(np.uint8)] = np.arange(16)[::-1]
        if (found := _encode(blocks, codes)) is not None:
            return _pack_levels(found[0], [found[1]], kind, (0, -1), shape)
    return None


def _remove_nines(blocks: QuantizedBlocks) -> QuantizedBlocks:
    """Return the blocks for E2M1, which has no 9: blocks with 9s are divided by 1.5, so that 12, 9,
    6, 3 become 8, 6, 4, 2. If that would change a weight, return the blocks unchanged."""
    integers, scales = blocks.integers, blocks.scales
    nines = (np.abs(integers) == 9).any(-1, keepdims=True)
    less = np.where(nines & (integers % 3 == 0), integers // 3 * 2, integers)
    more = np.where(nines, scales * np.float32(1.5), scales)
    return QuantizedBlocks(less, more, None) if (less * more == integers * scales).all() else blocks


def _pack_levels(
    integers: NDArray[Any],
    factors: list[Floats],
    kind: str,
    limits: tuple[int, int],
    shape: tuple[int, ...],
) -> Panels:
    """Pack integers of blocks, and their factors (scales, and offsets if any). The factors are
    stored in two levels if that is possible without loss."""
    rows = shape[0]
    if shape[1] % SUPER_BLOCK_WEIGHTS == 0 and not all(map(fits_float16, factors)):
        groups = integers.reshape(-1, integers.shape[2])
        levels = split_into_two_levels(groups, [x.reshape(-1) for x in factors], *limits)
        if levels is not None:
            two = [x.reshape(rows, -1) for x in levels.factors]
            supers = [x.reshape(rows, -1) for x in levels.supers]
            return pack_integers(levels.integers.reshape(shape), *two, kind=kind, supers=supers)
    return pack_integers(
        integers.reshape(shape), *(x.reshape(rows, -1) for x in factors), kind=kind
    )


def _reduce_integers(integers: NDArray[np.int8], scales: Floats) -> tuple[NDArray[np.int8], Floats]:
    """Return equivalent integers and scales. If a few blocks have large integers, for which all
    blocks would need more bits, the integers of these blocks are divided by their common factor,
    and the scales of these blocks are multiplied by that factor."""
    size = integers.shape[-1]
    some = np.abs(
        integers.reshape(-1, size)[:: -(-integers.size // (size * NUM_BIT_SAMPLE_BLOCKS))]
    ).max(1)
    max_integer = next((m for m in (8, 16, 32) if (some > m).mean() < 0.5), 128)
    if max(int(integers.max()), -int(integers.min())) <= max_integer:
        return integers, scales
    over = np.abs(integers).max(-1) > max_integer
    found, scale = integers[over].astype(np.int16), scales[over]
    factor = np.gcd.reduce(found, axis=1)[:, None]
    reduced, larger_scale = found // factor, scale * factor.astype(np.float32)
    if np.abs(reduced).max() <= max_integer and (reduced * larger_scale == found * scale).all():
        integers, scales = integers.copy(), scales.copy()
        integers[over], scales[over] = reduced, larger_scale
    return integers, scales


def _encode(blocks: QuantizedBlocks, codes: NDArray[np.int8]) -> tuple[Any, Floats] | None:
    """Return the codes of blocks, and their scales; None if an integer has no code. codes: the
    code of each byte value; -1: no code."""
    # try one row first: it suffices to exclude most weights, and is fast
    few = QuantizedBlocks(blocks.integers[:1], blocks.scales[:1], None)
    if len(blocks.scales) > 1 and _encode(few, codes) is None:
        return None
    zero = blocks.scales == 0
    straight = codes[blocks.integers.view(np.uint8)]
    turned = codes[(-blocks.integers).view(np.uint8)]  # with a negative scale
    is_straight = (straight >= 0).all(-1, keepdims=True)
    if not (is_straight | (turned >= 0).all(-1, keepdims=True) | zero).all():
        return None
    signs = np.where(is_straight, np.float32(1), np.float32(-1))
    return np.where(zero, 8, np.where(is_straight, straight, turned)), blocks.scales * signs


def pack_floats(weight: NDArray[Any], kind: str) -> Panels:
    """Pack floats `[N, K]`: float32, float16, or bfloat16 given as uint16."""
    K = weight.shape[1]
    data = np.zeros((-(-len(weight) // LANES), K, LANES), weight.dtype)

    def pack_part(i: int, j: int) -> None:
        for g in range(i, j):
            rows = weight[g * LANES : (g + 1) * LANES]
            data[g, :, : len(rows)] = rows.T

    map_parts(pack_part, len(data), max(1, NUMBERS_PER_TASK // (LANES * K)))
    return Panels(kind, 0, len(data) * LANES, K, data.view(np.uint8).reshape(-1))


def pack_integers(
    integers: NDArray[Any],
    scales: NDArray[Any],
    offsets: NDArray[Any] | None = None,
    *,
    kind: str,
    supers: list[NDArray[np.float16]] | None = None,
) -> Panels:
    """Pack quantized weights `[N, K]`, each scale * integer + offset.

    Args:
        integers: `[N, K]`; unsigned if there are offsets, else signed; or codes of a codebook.
        scales: `[N, blocks]`, one for each block of 32 or 16 weights.
        offsets: `[N, blocks]`, or None.
        kind: One of STORAGE_KINDS.
        supers: For scales that are themselves quantized (super-blocks): the float16 factors `[N,
            super-blocks]` of the int8 scales, then, if there are offsets, the factors of the int8
            offsets. None: scales and offsets are used as they are.
    """
    N, K = integers.shape
    bits = int(kind[-1])
    blocks = -(-K // BLOCK_WEIGHTS)
    halves = 2 if scales.shape[1] > blocks else 1
    factors = [scales] if offsets is None else [scales, offsets]
    form = (
        (offsets is not None) * FORM_OFFSETS
        + (halves == 2) * FORM_HALVES
        + bool(supers) * FORM_SUPER
    )
    form += (not supers and not all(map(fits_float16, factors))) * FORM_WIDE
    number: Any = np.int8 if form & FORM_SUPER else np.float32 if form & FORM_WIDE else np.float16
    columns = [_arrange_in_panels(x.astype(number), blocks * halves, blocks) for x in factors]
    group = SUPER_BLOCK_WEIGHTS // BLOCK_WEIGHTS if form & FORM_SUPER else blocks
    heads = [_arrange_in_panels(x, blocks // group, blocks // group) for x in supers or []]
    head, before = (sum(x.shape[2] for x in some) for some in (heads, columns))
    size = before + {8: 512, 6: 384, 5: 320, 4: 256}[bits]
    data = np.zeros((-(-N // LANES), blocks // group, head + group * size), np.uint8)
    inner = data[:, :, head:].reshape(*data.shape[:2], group, size)  # a view
    if heads:
        data[:, :, :head] = np.concatenate(heads, 2)
    inner[..., :before] = np.concatenate(columns, 2).reshape(*inner.shape[:3], before)
    zero = np.uint8(0 if form & FORM_OFFSETS or kind in CODEBOOKS else 2 ** (bits - 1))

    def pack_part(i: int, j: int) -> None:
        q = np.zeros(((j - i) * LANES, blocks * BLOCK_WEIGHTS), np.uint8)
        rows = integers[i * LANES : j * LANES].astype(np.uint8)
        q[: len(rows), :K] = rows + zero
        # four consecutive weights of an output are adjacent
        runs = q.view(np.uint32).reshape(j - i, LANES, -1).swapaxes(1, 2)
        q = np.ascontiguousarray(runs).view(np.uint8).reshape(*inner[i:j].shape[:3], 8, 64)
        to = inner[i:j, :, :, before:]
        if bits == 8:
            to[:] = q.reshape(to.shape)
            return
        to[..., :256] = ((q[..., :4, :] & 15) | (q[..., 4:, :] << 4)).reshape(*to.shape[:3], 256)
        upper = q >> 4
        if bits == 5:
            to[..., 256:] = sum(upper[..., c, :] << c for c in range(8))
        elif bits == 6:
            for at, c in ((256, 0), (320, 2)):
                low = upper[..., c, :] | upper[..., c + 1, :] << 2
                high = upper[..., c + 4, :] | upper[..., c + 5, :] << 2
                to[..., at : at + 64] = low | high << 4

    map_parts(pack_part, len(data), max(1, NUMBERS_PER_TASK // (LANES * K)))
    return Panels(kind, form, len(data) * LANES, K, data.reshape(-1))


def fits_float16(x: NDArray[Any]) -> bool:
    """Return whether float16 represents all numbers exactly."""
    with np.errstate(over="ignore"):
        return bool((x.astype(np.float16) == x).all())


def _arrange_in_panels(rows: NDArray[Any], columns: int, blocks: int) -> NDArray[np.uint8]:
    """Return numbers `[N, columns]`, padded with zeros, as bytes `[panels, blocks, ..]`."""
    full = np.zeros((-(-len(rows) // LANES) * LANES, columns), rows.dtype)
    full[: len(rows), : rows.shape[1]] = rows
    panels = np.ascontiguousarray(full.reshape(-1, LANES, columns).swapaxes(1, 2))
    return panels.view(np.uint8).reshape(len(panels), blocks, -1)


class TwoLevels(NamedTuple):
    """Quantized weights with scales in two levels, as in GGUF's K quants: a scale is an int8 factor
    times the float16 of its super-block of 256 weights. The levels are found from the scales
    (`models.quantized_blocks`), without changing a weight. If several scales give a block the
    same weights, a scale is chosen that its super-block can represent."""

    integers: NDArray[np.int8]  # [blocks, size]
    factors: list[NDArray[np.int8]]  # [blocks]: of scales, then of offsets if there are any
    supers: list[NDArray[np.float16]]  # [super-blocks]: for scales, then for offsets


def split_into_two_levels(
    integers: NDArray[np.int8], parts: list[Floats], low: int, high: int
) -> TwoLevels | None:
    """Split scales into two levels. `parts` holds the scales `[blocks]` of integers `[blocks,
    size]`, then their offsets if there are any. Return None if a split without loss is impossible
    with integers from `low` to `high`."""
    blocks = SUPER_BLOCK_WEIGHTS // integers.shape[1]
    supers = [find_common_factor(x.reshape(-1, blocks)) for x in parts]
    if any(x is None for x in supers):
        return None
    each = [np.repeat(x, blocks) for x in supers if x is not None]
    fits = [_divide(x, d)[1] for x, d in zip(parts, each, strict=True)]
    wrong = np.flatnonzero(~np.logical_and.reduce(fits))
    if wrong.size:
        some = [x[wrong] for x in parts]
        refitted = _refit(integers[wrong], some, [d[wrong] for d in each], low, high)
        if refitted is None:
            return None
        integers, parts = integers.copy(), [x.copy() for x in parts]
        for whole, part in zip((integers, *parts), refitted, strict=True):
            whole[wrong] = part
    factors = [_divide(x, d)[0].astype(np.int8) for x, d in zip(parts, each, strict=True)]
    return TwoLevels(integers, factors, [x.astype(np.float16) for x in supers if x is not None])


def find_common_factor(x: Floats) -> Floats | None:
    """Return `[n]`: for each row of x `[n, factors]` a float16 number (as float32) such that most
    entries of the row are this number times an int8. Return None if most rows have none."""
    if (
        len(x) > NUM_SAMPLE_SUPER_BLOCKS
        and find_common_factor(x[:: len(x) // NUM_SAMPLE_SUPER_BLOCKS][:NUM_SAMPLE_SUPER_BLOCKS])
        is None
    ):
        return None
    best, max_count = np.zeros(len(x), np.float32), np.zeros(len(x), np.int64)
    ordered, left = np.argsort(-np.abs(x), axis=1)[:, :2], np.arange(len(x))
    for rank, n in product(range(ordered.shape[1]), MAX_FACTOR_CANDIDATES):
        part = x[left]
        peak = np.take_along_axis(part, ordered[left, rank, None], 1)[:, 0]
        with np.errstate(over="ignore"):
            factor = (peak / np.float32(n)).astype(np.float16).astype(np.float32)
        count = _divide(part, factor[:, None])[1].sum(1)
        better = count > max_count[left]
        best[left[better]], max_count[left[better]] = factor[better], count[better]
        left = left[count < x.shape[1]]
        if not left.size:
            break
    return best if (max_count * 2 > x.shape[1]).mean() >= 0.5 else None


def _divide(x: Floats, factor: Floats) -> tuple[Any, Any]:
    """Return x / factor rounded to integers, and for each integer whether it is exact and fits
    int8."""
    with np.errstate(all="ignore"):
        k = np.rint(np.where(x == 0, 0, x / factor))
        return k, (k * factor == x) & (k >= -128) & (k <= 127) | (x == 0)


def _refit(
    whole: NDArray[np.int8], parts: list[Floats], supers: list[Floats], low: int, high: int
) -> list[Any] | None:
    """Return other integers, scales and offsets that give exactly the same weights, and in which
    scales and offsets are int8 multiples of `supers`; None if that is impossible."""
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
        k, scale = (
            integers[left] * times + shift,
            _round_to_multiples(scales[left] / times, supers[0][left]),
        )
        new = [scale]
        if len(parts) > 1:
            new.append(_round_to_multiples(offsets[left] - scale * shift, supers[1][left]))
        weight = k * scale + (new[1] if len(parts) > 1 else 0)
        right = ((k >= low) & (k <= high) & (weight.astype(np.float32) == weights[left])).all(1)
        for to, x in zip(made, (k, *(x[:, 0] for x in new)), strict=True):
            to[left[right]] = x[right]
        left = left[~right]
        if not left.size:
            return made
    return None


def _round_to_multiples(x: Any, factor: Floats) -> Any:
    """Return, for each entry of x `[n, 1]`, the nearest int8 multiple of its factor `[n]`."""
    with np.errstate(all="ignore"):
        k = np.nan_to_num(np.rint(x / factor[:, None]))
    return np.clip(k, -128, 127) * factor[:, None]
