"""Weights in blocks of small integers (`models.blocks`) kept so in an OpenVINO graph.

OpenVINO's products read integers and scales; offsets are a product of their own, over the sums of
the states by block: sum(w x) = scale * sum(k x) + offset * sum(x).
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops

from foretoken.models.blocks import Blocks, Floats, found
from foretoken.models.openvino.weights import in_four_bits, is_weight


def kept(graph: ov.Model, most: int = 8, *, offsets: bool = True) -> ov.Model:
    """Keep weights of products and look-ups in their blocks, if these have at most so many bits, in
    place; returns the graph. offsets: whether products keep blocks that have offsets."""
    weights: list[tuple[Any, list[Any], list[int]]] = []
    for node in graph.get_ordered_ops():
        if is_weight(node):
            readers: list[Any] = [x.get_node() for x in node.output(0).get_target_inputs()]
            if all(_reads_rows(reader, node) for reader in readers):
                weights.append((node, readers, _lengths(readers)))
    with ThreadPoolExecutor(torch.get_num_threads()) as threads:  # NumPy's work is not Python's
        found_in = threads.map(lambda one: _parts(one[0].data, one[2]), weights)
        for (_, readers, _), parts in zip(weights, found_in, strict=True):
            blocks = [part for part in parts if isinstance(part, Blocks)]
            multiplied = offsets or all(part.offsets is None for part in blocks)
            small = blocks and max(part.bits for part in blocks) <= most
            for reader in readers if small else ():
                multiplies = reader.get_type_name() == "MatMul"
                if multiplies and not multiplied:
                    continue
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
