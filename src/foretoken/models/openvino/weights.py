"""Weights of an OpenVINO graph in fewer bytes: the same numbers, or rounded ones, another model.

Eight bits: w is read as scale * round(w / scale), with scale = max |w| / 127 over what flows into
one output. Four bits: w is read as scale * k, k from -8 to 7, over groups of `GROUP` weights that
flow into one output; of a few scales each group has the one of the least squared error, fitted to
its integers by least squares. The embedding and the output layer, whose rounding is seen in
the distribution itself, have eight bits, as have products that groups do not divide.

bfloat16: weights that it represents exactly, as most published ones, are kept so: half the bytes to
read, the same numbers to compute with. OpenVINO's products widen or scale such weights on the way
from memory.

Products that read the same states become one, over their weights one behind another (queries, keys
and values; gates and what they gate): beside reading its weights, each product gathers its threads
and, where weights are integers, rounds the states anew. Knows no models, only graphs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops

from foretoken.models.rounding import Floats, nearest, whole

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
    """Return the integers that `whole` gave as products read them."""
    product: Any = ops.multiply(ops.convert(ops.constant(integers), "f32"), ops.constant(scale))
    return product.output(0)


GROUP = 64
ROWS = 1024  # outputs that are rounded at a time, which bounds memory


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
    """Tell whether this is an operation of that kind on a weight."""
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
    small = in_four_bits(integers.reshape(out, inner // GROUP, GROUP))
    product = ops.multiply(ops.convert(small, "f16"), ops.constant(scales[..., None]))
    flat: Any = ops.reshape(product, ops.constant(np.array([out, inner])), special_zero=False)
    return ops.convert(flat, "f32").output(0)


def in_four_bits(integers: NDArray[np.int8]) -> Any:
    """The constant of integers two to a byte, the first in the low half: from -8 to 7, or 0 to
    15."""
    pairs = integers.reshape(-1, 2)
    packed = (pairs[:, 0] & 15 | pairs[:, 1] << 4).astype(np.uint8)
    kind = ov.Type.u4 if integers.max() > 7 else ov.Type.i4
    tensor = ov.Tensor(packed, ov.Shape(integers.shape), kind)
    return ov.op.Constant(tensor, shared_memory=False)


def looked_up(node: Any) -> Any:
    """The rows that a look-up reads, from integers and a scale for each row."""
    integers, scale = whole(node.input_value(0).get_node().data, axis=1)
    places, axis = node.input_value(1), node.input_value(2)
    out = ops.convert(ops.gather(ops.constant(integers), places, axis), "f32")
    product: Any = ops.multiply(out, ops.gather(ops.constant(scale), places, axis))
    return product.output(0)


WORTH_HALVING = (
    2**25
)  # numbers in a graph's matrices; fewer stay in a CPU's cache, where widening costs
READERS = ("MatMul", "Gather")
MARK = "decompression_0"  # OpenVINO's name for a conversion that is that must stay in the graph


def halved(graph: ov.Model) -> ov.Model:
    """Keep a large graph's matrices as bfloat16 where that changes none, in place; returns it."""
    matrices = [node for node in graph.get_ordered_ops() if is_weight(node)]
    if sum(prod(node.get_output_shape(0)) for node in matrices) < WORTH_HALVING:
        return graph
    for node in matrices:
        readers = node.output(0).get_target_inputs()
        if all(reader.get_node().get_type_name() in READERS for reader in readers):
            narrow = half(node)
            for reader in readers if narrow else ():
                reader.replace_source_output(narrow)
    graph.validate_nodes_and_infer_types()
    return graph


def half(node: Any) -> Any:
    """The same constant from half as many bytes, or None where that would round it."""
    tensor = torch.tensor(node.data)
    narrow = tensor.bfloat16()
    if not torch.equal(narrow.float(), tensor):
        return None
    return widened(narrow)


def widened(weight: torch.Tensor) -> Any:
    """A weight in bfloat16, as products in float32 read it."""
    bits = ov.Tensor(weight.view(torch.int16).numpy(), ov.Shape(weight.shape), ov.Type.bf16)
    return ops.convert(ov.op.Constant(bits, shared_memory=False), "f32").output(0)


def widened_in_products(graph: ov.Model) -> ov.Model:
    """Mark what `halved` made, in place: else compiling widens it beforehand. Returns the graph.

    The mark is not saved with a graph.
    """
    for node in graph.get_ops():
        if node.get_type_name() == "Convert":
            weight = node.input_value(0).get_node()
            if weight.get_type_name() == "Constant" and weight.get_element_type() == ov.Type.bf16:
                node.get_rt_info()[MARK] = ""
    return graph


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
        if None in adders:  # then the others' sums stay behind the joined product
            adders = [None] * len(products)
        if len(products) > 1:
            _join(products, adders)
    graph.validate_nodes_and_infer_types()
    return graph


def _is_product(node: Any) -> bool:
    """Tell whether this multiplies states by a constant matrix `[out, in]`."""
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
