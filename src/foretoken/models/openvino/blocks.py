"""Weights that are blocks of small integers already, as those of GGUF files, kept so in a graph:
the same numbers, in a quarter of the bytes to read.

A block is 32 or 16 weights that flow into one output, each k * scale + offset with an integer k of
four or eight bits; most formats have no offset. Blocks are recognised by their values alone, to the
bit, whatever the format was called and wherever a row was moved since. OpenVINO's products read
integers and scales; offsets are a product of their own, over the sums of the states by block:
sum(w x) = scale * sum(k x) + offset * sum(x).

Weights that are no such blocks stay as they are. Does not round.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops

from foretoken.models.openvino.weights import in_four_bits, is_weight

Floats = NDArray[np.float32]
Choices = NDArray[np.int64]
SIZES = (32, 16)
SAMPLE = 16  # blocks that tell whether a weight has any, and which candidates are frequent
REST = 0.5  # the share of blocks that the frequent candidates may leave
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


def kept(graph: ov.Model, most: int = 8) -> ov.Model:
    """Keep weights of products and look-ups in their blocks, if these have at most so many bits, in
    place; returns the graph."""
    weights: list[tuple[Any, list[Any], list[int]]] = []
    for node in graph.get_ordered_ops():
        if is_weight(node):
            readers: list[Any] = [x.get_node() for x in node.output(0).get_target_inputs()]
            if all(_reads_rows(reader, node) for reader in readers):
                weights.append((node, readers, _lengths(readers)))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # NumPy's work is not Python's
        found_in = threads.map(lambda one: _parts(one[0].data, one[2]), weights)
        for (_, readers, _), parts in zip(weights, found_in, strict=True):
            bits = [part.bits for part in parts if isinstance(part, Blocks)]
            for reader in readers if bits and max(bits) <= most else ():
                multiplies = reader.get_type_name() == "MatMul"
                made = product(reader, parts) if multiplies else look_up(reader, parts[0])
                reader.output(0).replace(made.output(0))
    graph.validate_nodes_and_infer_types()
    return graph


def _reads_rows(reader: Any, weight: Any) -> bool:
    """Tell whether this multiplies states by a weight `[out, in]`, or looks up its rows."""
    if reader.get_type_name() == "MatMul":
        turned = reader.get_attributes()
        right = turned["transpose_b"] and not turned["transpose_a"]
        return right and reader.input_value(1).get_node() == weight
    return (
        reader.get_type_name() == "Gather"
        and reader.input_value(0).get_node() == weight
        and not np.any(reader.input_value(2).get_node().data)  # along axis 0
    )


def _parts(weight: Floats, lengths: list[int]) -> list[Any]:
    """A weight in blocks; or, where products of several kinds of blocks became one product, the
    parts of it of these lengths, each in blocks where it has any."""
    if blocks := found(weight):
        return [blocks]
    parts = np.split(weight, np.cumsum(lengths[:-1])) if lengths else []
    return [found(part) or part for part in parts]


def _lengths(readers: list[Any]) -> list[int]:
    """Return the lengths that the only reader, a product, is split into, maybe after a sum; [] for
    others."""
    if len(readers) != 1 or readers[0].get_type_name() != "MatMul":
        return []
    node = readers[0]
    for _ in range(2):
        (target, *others) = node.output(0).get_target_inputs()
        node = target.get_node()
        if others or node.get_type_name() not in ("Add", "VariadicSplit"):
            return []
        if node.get_type_name() == "VariadicSplit":
            return list(node.input_value(2).get_node().data)
    return []


def product(node: Any, parts: list[Any]) -> Any:
    """The product of states and a weight in blocks, or in several parts."""
    states = node.input_value(0)
    made: list[Any] = [
        _multiplied(states, part)
        if isinstance(part, Blocks)
        else ops.matmul(states, ops.constant(part), False, True)
        for part in parts
    ]
    return made[0] if len(made) == 1 else ops.concat(made, -1)


def _multiplied(states: Any, blocks: Blocks) -> Any:
    out, count, size = blocks.integers.shape
    integers = ops.constant(blocks.integers) if blocks.bits == 8 else in_four_bits(blocks.integers)
    scaled = ops.multiply(ops.convert(integers, "f32"), _floats(blocks.scales))
    weight = ops.reshape(scaled, _shape(out, count * size), special_zero=False)
    made = ops.matmul(states, weight, False, True)
    if blocks.offsets is None:
        return made
    kept_axes = [0] * (states.get_partial_shape().rank.get_length() - 1)
    pieces = ops.reshape(states, _shape(*kept_axes, count, size), special_zero=True)
    sums = ops.reduce_sum(pieces, ops.constant(np.array([-1])), keep_dims=False)
    return ops.add(made, ops.matmul(sums, ops.constant(blocks.offsets[..., 0]), False, True))


def look_up(node: Any, blocks: Blocks) -> Any:
    """The rows of a weight in blocks."""
    places, axis = node.input_value(1), node.input_value(2)
    rows = ops.convert(ops.gather(ops.constant(blocks.integers), places, axis), "f32")
    made: Any = ops.multiply(rows, ops.gather(_floats(blocks.scales), places, axis))
    if blocks.offsets is not None:
        made = ops.add(made, ops.gather(ops.constant(blocks.offsets), places, axis))
    kept_axes = [0] * places.get_partial_shape().rank.get_length()
    return ops.reshape(made, _shape(*kept_axes, -1), special_zero=True)


def _floats(values: Floats) -> Any:
    """A constant in float16 where that changes nothing, as products read it."""
    with np.errstate(over="ignore"):
        half = values.astype(np.float16)
    if np.array_equal(half.astype(np.float32), values):
        return ops.convert(ops.constant(half), "f32")
    return ops.constant(values)


def _shape(*lengths: int) -> Any:
    return ops.constant(np.array(lengths))


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


def _multiples(groups: Floats, n: Choices) -> tuple[Floats, Floats]:
    """Scales without offsets: the largest weight is -n times the scale."""
    peak = np.take_along_axis(groups, np.abs(groups).argmax(1)[:, None], 1)
    scales = peak / -n.astype(np.float32)[:, None, None]
    return scales, np.zeros_like(scales)


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


FORMS = (  # four bits first; a span of 31 has five
    (_multiples, np.arange(1, 9)),
    (_multiples, np.arange(1, 128)),
    (_steps, _spans(15)),
    (_steps, _spans(31)),
)


def _shortened(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """The nearest numbers of `EXACT` significant bits."""
    mantissa, exponent = np.frexp(values)
    return np.ldexp(np.rint(mantissa * 2**EXACT), exponent - EXACT)


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
    left = np.arange(len(groups))
    for i in np.argsort(-hits, kind="stable"):
        if hits[i] == 0 and len(left) > REST * len(groups):
            return None
        part = groups[left]
        new_scales, new_offsets = (values[0] for values in form(part, choices[[i]]))
        new, fits = _fit(part, new_scales, new_offsets)
        done = left[fits]
        k[done], scales[done], offsets[done] = new[fits], new_scales[fits], new_offsets[fits]
        left = left[~fits]
        if not left.size:
            return _centred(k, scales, offsets) if form is _steps else Blocks(k, scales, None)
    return None


def _centred(k: NDArray[np.int8], scales: Floats, offsets: Floats) -> Blocks:
    """The same with integers around zero, where the offsets stay exact: their product then is of
    smaller numbers, and rounds less."""
    shift = 8 if k.max() <= 15 else 16
    moved = offsets.astype(np.float64) + shift * scales.astype(np.float64)
    narrow = moved.astype(np.float32)
    exact = bool((narrow == moved).all())
    return Blocks(k - np.int8(shift), scales, narrow) if exact else Blocks(k, scales, offsets)
