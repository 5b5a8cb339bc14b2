"""Products that read the same states become one, over their weights one behind another: queries,
keys and values; gates and what they gate.

A product's own work is to read its weights; beside it each one rounds the states anew where weights
are integers, and gathers its threads. It does not know models, only graphs.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import openvino as ov
from openvino import opset13 as ops


def joined(graph: ov.Model) -> ov.Model:
    """Join the graph's products by what they read, in place; returns it. The numbers are the same,
    up to the order of sums in another kernel."""
    readers: dict[tuple[str, int], list[Any]] = {}
    for node in graph.get_ordered_ops():
        if _is_product(node):
            states = node.input_value(0)
            name = states.get_node().get_friendly_name(), states.get_index()
            readers.setdefault(name, []).append(node)
    for products in readers.values():
        adders = [_bias(product) for product in products]
        if len(products) > 1 and len({adder is None for adder in adders}) == 1:
            _join(products, adders)
    graph.validate_nodes_and_infer_types()
    return graph


def _is_product(node: Any) -> bool:
    """Whether this multiplies states by a constant matrix `[out, in]`."""
    return (
        node.get_type_name() == "MatMul"
        and node.get_attributes()["transpose_b"]
        and not node.get_attributes()["transpose_a"]
        and _is_constant(node.input_value(1).get_node())
        and len(node.input_value(1).get_node().get_output_shape(0)) == 2
    )


def _is_constant(node: ov.Node) -> bool:
    return node.get_type_name() == "Constant" and node.get_element_type() == ov.Type.f32


def _bias(product: Any) -> Any:
    """The sum that alone reads a product and adds a constant to its outputs; None where there is
    none."""
    out = product.input_value(1).get_node().get_output_shape(0)[0]
    (reader, *others) = product.output(0).get_target_inputs()
    adder = reader.get_node()
    if others or adder.get_type_name() != "Add":
        return None
    constant = adder.input_value(1 - reader.get_index()).get_node()
    if not _is_constant(constant):
        return None
    (*_, last) = constant.get_output_shape(0) or (1,)
    return adder if last == constant.data.size == out else None


def _join(products: list[Any], adders: list[Any]) -> None:
    weights = [product.input_value(1).get_node().data for product in products]
    fused: Any = ops.matmul(
        products[0].input_value(0), ops.constant(np.concatenate(weights)), False, True
    )
    if adders[0] is not None:
        fused = ops.add(fused, ops.constant(np.concatenate([_added(adder) for adder in adders])))
    sizes = ops.constant(np.array([len(weight) for weight in weights]))
    parts: Any = ops.variadic_split(fused, ops.constant(-1), sizes)
    for i, (product, adder) in enumerate(zip(products, adders, strict=True)):
        (adder or product).output(0).replace(parts.output(i))


def _added(adder: Any) -> Any:
    """The constant of a sum, `[out]`."""
    nodes = [adder.input_value(i).get_node() for i in (0, 1)]
    return next(node for node in nodes if node.get_type_name() == "Constant").data.reshape(-1)
