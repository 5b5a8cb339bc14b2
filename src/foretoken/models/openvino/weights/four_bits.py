"""Weights as four-bit integers, with a scale for each group of them: another, smaller model.

w is read as scale * k, k from -8 to 7, over groups of `GROUP` weights that flow into one output. Of
a few scales each group has the one of the least squared error, fitted to its integers by least
squares. OpenVINO's products read such weights as they are. Eight bits have what makes tokens states
and states logits, whose rounding is seen in the distribution itself, and products that groups do
not divide. It does not know models, only graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

from foretoken.models.openvino.weights.eight_bits import is_weight, rounded, whole

GROUP = 64
REACHES = (1.0, 0.95, 0.9, 0.85, 0.8)  # shares of a group's largest weight that -8 stands for
ROWS = 1024  # outputs that are rounded at a time, which bounds memory

Floats = NDArray[np.float32]


def four_bits(graph: ov.Model) -> ov.Model:
    """Round the constant weights of the graph's products and look-ups, in place; returns it."""
    products = [node for node in graph.get_ordered_ops() if _reads(node, "MatMul", 1)]
    for node in products:
        weight = node.input_value(1).get_node()
        transposed = node.get_attributes()["transpose_b"]
        small = transposed and weight.get_output_shape(0)[1] % GROUP == 0 and node != products[-1]
        constant = grouped(weight) if small else rounded(weight, axis=1 if transposed else 0)
        node.input(1).replace_source_output(constant)
    for node in graph.get_ordered_ops():
        if _reads(node, "Gather", 0):
            node.output(0).replace(looked_up(node))
    graph.validate_nodes_and_infer_types()
    return graph


def _reads(node: Any, kind: str, place: int) -> bool:
    """Whether this is an operation of that kind on a weight."""
    return node.get_type_name() == kind and is_weight(node.input_value(place).get_node())


def grouped(node: Any) -> Any:
    """A constant `[out, in]` from integers and the scales of groups."""
    weight: Floats = node.data
    out, inner = weight.shape
    parts = [nearest(weight[i : i + ROWS].reshape(-1, GROUP)) for i in range(0, out, ROWS)]
    return in_groups(
        np.concatenate([k for k, _ in parts]).reshape(out, inner),
        np.concatenate([scale for _, scale in parts]).reshape(out, inner // GROUP),
    )


def in_groups(integers: NDArray[np.int8], scales: NDArray[np.float16]) -> Any:
    """Integers `[out, in]` and the scales of their groups, `[out, in / GROUP]`, as products read
    them."""
    out, inner = integers.shape
    integers = integers.reshape(-1, 2)
    # two to a byte, the first in the low half
    packed = (integers[:, 0] & 15 | integers[:, 1] << 4).astype(np.uint8)
    shape = ov.Shape([out, inner // GROUP, GROUP])
    small = ov.op.Constant(ov.Tensor(packed, shape, ov.Type.i4), shared_memory=False)
    product = ops.multiply(ops.convert(small, "f16"), ops.constant(scales[..., None]))
    flat: Any = ops.reshape(product, ops.constant(np.array([out, inner])), special_zero=False)
    return ops.convert(flat, "f32").output(0)


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


def looked_up(node: Any) -> Any:
    """The rows that a look-up reads, from integers and a scale for each row."""
    integers, scale = whole(node.input_value(0).get_node().data, axis=1)
    places, axis = node.input_value(1), node.input_value(2)
    out = ops.convert(ops.gather(ops.constant(integers), places, axis), "f32")
    product: Any = ops.multiply(out, ops.gather(ops.constant(scale), places, axis))
    return product.output(0)
