"""Weights as eight-bit integers, with a scale for each output of a product: another, smaller model.

w is read as scale * round(w / scale), with scale = max |w| / 127 over what flows into one output.
OpenVINO's products read such weights as they are. It does not know models, only graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from numpy.typing import NDArray
from openvino import opset13 as ops

WORTH = 2**14  # elements; smaller weights cost no time


def eight_bits(graph: ov.Model) -> ov.Model:
    """Round the constant weights of the graph's products, in place; returns it."""
    for node in graph.get_ordered_ops():
        if node.get_type_name() == "MatMul":
            weight = node.input_value(1).get_node()
            if is_weight(weight):
                transposed = node.get_attributes()["transpose_b"]
                node.input(1).replace_source_output(rounded(weight, axis=1 if transposed else 0))
    graph.validate_nodes_and_infer_types()
    return graph


def is_weight(node: ov.Node) -> bool:
    if node.get_type_name() != "Constant" or node.get_element_type() != ov.Type.f32:
        return False
    shape = list(node.get_output_shape(0))
    return len(shape) == 2 and shape[0] * shape[1] >= WORTH


def rounded(node: Any, axis: int) -> Any:
    """The same constant from integers and scales; `axis` is the one that a product sums over."""
    return scaled(*whole(node.data, axis))


def scaled(integers: NDArray[np.int8], scale: NDArray[np.float32]) -> Any:
    """What `whole` gave, as products read it."""
    product: Any = ops.multiply(ops.convert(ops.constant(integers), "f32"), ops.constant(scale))
    return product.output(0)


def whole(weight: NDArray[Any], axis: int) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Integers, and the scales of what lies along an axis."""
    scale = np.abs(weight).max(axis=axis, keepdims=True) / 127
    scale = np.where(scale > 0, scale, 1).astype(np.float32)
    return np.rint(weight / scale).astype(np.int8), scale
