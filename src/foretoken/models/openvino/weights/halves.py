"""Weights that bfloat16 represents exactly, as most published ones, are kept as bfloat16: half the
bytes to read, the same numbers to compute with.

OpenVINO's products widen such weights on the way from memory, if the graph asks for it. It does not
know models, only graphs.
"""

from __future__ import annotations

from math import prod
from typing import Any

import openvino as ov
import torch
from openvino import opset13 as ops

from foretoken.models.openvino.weights.eight_bits import is_weight

WORTH = 2**25  # numbers in a graph's matrices; fewer stay in a CPU's cache, where widening costs
READERS = ("MatMul", "Gather")
MARK = "decompression_0"  # OpenVINO's name for a conversion that is that must stay in the graph


def halved(graph: ov.Model) -> ov.Model:
    """Keep a large graph's matrices as bfloat16 where that changes none, in place; returns it."""
    matrices = [node for node in graph.get_ordered_ops() if is_weight(node)]
    if sum(prod(node.get_output_shape(0)) for node in matrices) < WORTH:
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
