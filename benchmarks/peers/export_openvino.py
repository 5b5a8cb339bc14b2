"""A causal model's folder as the stateful OpenVINO model that OpenVINO GenAI reads.

    python benchmarks/peers/export_openvino.py MODEL FOLDER DTYPE  # by peer_openvino_genai.py

Runs in the project's Python with OpenVINO's packages. transformers' forward is traced once over
explicit keys and values, which then become the model's state. Weights are stored as float32,
rounded to bfloat16 first where that is DTYPE; int8 is for matrices, with a scale for each row; int4
is the package's own, in blocks of 32, with int8 for embeddings and outputs: both systems run the
same numbers. The precision of products is chosen where the model is compiled.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import torch
from numpy.typing import NDArray
from openvino import opset13 as ops
from openvino._offline_transformations import apply_make_stateful_transformation
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from foretoken.models.native.packing import BLOCK_WEIGHTS, round_blocks

INPUTS = ["input_ids", "attention_mask", "position_ids"]


class Traced(nn.Module):
    """The model as a function of tensors: ids, mask, positions, then k and v of every layer."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.model = model

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, position_ids: Tensor, *past: Tensor
    ) -> tuple[Tensor, ...]:
        cache = _cache(list(past))
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=_mask(attention_mask, position_ids),
            position_ids=position_ids,
            past_key_values=cache,
            use_cache=True,
        )
        return (outputs.logits, *(x for layer in cache.layers for x in (layer.keys, layer.values)))


def _mask(attention_mask: Tensor, position_ids: Tensor) -> Tensor:
    """Causal, without the padding; additive, `[B, 1, new, all]`."""
    places = attention_mask.cumsum(-1) - 1
    visible = (places[:, None, None, :] <= position_ids[:, None, :, None]).to(torch.float32)
    return (1.0 - visible * attention_mask[:, None, None, :]) * -1e9


def _cache(past: list[Tensor]) -> DynamicCache:
    cache = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [DynamicLayer() for _ in past[::2]]
    for layer, keys, values in zip(cache.layers, past[::2], past[1::2], strict=True):
        layer.lazy_initialization(keys, values)
        layer.keys, layer.values = keys, values
    return cache


def export(model: PreTrainedModel) -> ov.Model:
    """input_ids, attention_mask, position_ids `[B, n]`, beam_idx `[B]` -> logits `[B, n, V]`."""
    example = DynamicCache(config=model.config)
    with torch.no_grad():
        model(input_ids=torch.tensor([[0, 0]]), past_key_values=example)
    shapes = [x.shape for layer in example.layers for x in (layer.keys, layer.values)]
    ids, places = torch.zeros(1, 2, dtype=torch.long), torch.tensor([[3, 4]])
    past = [torch.zeros(1, shape[1], 3, shape[3]) for shape in shapes]
    inputs = (ids, torch.ones(1, 5, dtype=torch.long), places, *past)
    with torch.no_grad():
        graph = ov.convert_model(Traced(model), example_input=inputs)
    state = [f"past.{i}" for i in range(len(shapes))]
    for i, (port, name) in enumerate(zip(graph.inputs, [*INPUTS, *state], strict=True)):
        port.get_tensor().set_names({name})
        shape = [-1, -1] if i < 3 else [-1, shapes[i - 3][1], -1, shapes[i - 3][3]]
        port.get_node().set_partial_shape(ov.PartialShape(shape))
    after = [name.replace("past", "present") for name in state]
    for port, name in zip(graph.outputs, ["logits", *after], strict=True):
        port.get_tensor().set_names({name})
    graph.validate_nodes_and_infer_types()
    _reorder(graph, state)
    apply_make_stateful_transformation(graph, dict(zip(state, after, strict=True)))
    _begin_empty(graph)
    graph.validate_nodes_and_infer_types()
    return graph


def _reorder(graph: ov.Model, state: list[str]) -> None:
    """Every past is read through beam_idx, as GenAI expects of a stateful model."""
    beam = ops.parameter([-1], np.int32, name="beam_idx")
    beam.output(0).get_tensor().set_names({"beam_idx"})
    graph.add_parameters([beam])
    for name in state:
        port = graph.input(name).get_node().output(0)
        readers = port.get_target_inputs()
        gathered = ops.gather(port, beam, ops.constant(0))
        for reader in readers:
            reader.replace_source_output(gathered.output(0))
    graph.validate_nodes_and_infer_types()


def _begin_empty(graph: ov.Model) -> None:
    """State that was never written has as many rows as the input, and no tokens."""
    rows = ops.gather(ops.shape_of(graph.input("input_ids")), ops.constant([0]), ops.constant(0))
    for node in graph.get_ops():
        if node.get_type_name() == "ReadValue":
            heads, width = (node.get_output_partial_shape(0)[i].get_length() for i in (1, 3))
            shape = ops.concat([rows, ops.constant([heads, 0, width])], axis=0)
            node.set_arguments([ops.broadcast(ops.constant(np.float32(0)), shape)])


def compress(graph: ov.Model, dtype: str) -> None:
    """Store the weights of products and look-ups in integers."""
    weights = [w for node in graph.get_ordered_ops() if (w := _weight(node))]
    for port, weight, out in weights:
        if dtype == "int8" or out or weight.shape[1] % BLOCK_WEIGHTS:
            small = _rounded_rows(weight, 1 - out)
        else:
            lookup = port.get_node().get_type_name() == "Gather"
            small = _rounded_blocks(weight, 8 if lookup or port is weights[-1][0] else 4)
        port.replace_source_output(small)
    graph.validate_nodes_and_infer_types()


def _weight(node: Any) -> tuple[Any, NDArray[np.float32], int] | None:
    """The input of a product or look-up that is a matrix, its numbers, and the axis of outputs."""
    place = {"MatMul": 1, "Gather": 0}.get(node.get_type_name())
    if place is None:
        return None
    constant = node.input_value(place).get_node()
    if constant.get_type_name() != "Constant" or len(constant.shape) != 2:
        return None
    transposed = place == 0 or node.get_attributes()["transpose_b"]
    return node.input(place), constant.get_data(), 0 if transposed else 1


def _rounded_rows(weight: NDArray[np.float32], axis: int) -> Any:
    """Integers of eight bits with a scale for each output; `axis` is that of the inputs."""
    scale = np.maximum(np.abs(weight).max(axis, keepdims=True), 1e-12) / 127
    small = ops.constant(np.round(weight / scale).astype(np.int8))
    wide = ops.multiply(ops.convert(small, np.float32), ops.constant(scale.astype(np.float32)))
    return wide.output(0)


def _rounded_blocks(weight: NDArray[np.float32], bits: int) -> Any:
    """Integers with a scale for each block of 32 inputs, `weight` being `[out, in]`."""
    blocks = round_blocks(weight, bits)
    integers = ops.constant(blocks.integers)
    if bits == 4:
        pairs = blocks.integers.reshape(-1, 2)
        packed = (pairs[:, 0] & 15 | pairs[:, 1] << 4).astype(np.uint8)
        tensor = ov.Tensor(packed, ov.Shape(blocks.integers.shape), ov.Type.i4)
        integers = ov.op.Constant(tensor, shared_memory=False)
    scales = ops.constant(blocks.scales.astype(np.float16))
    wide = ops.multiply(ops.convert(integers, np.float16), scales)
    flat = ops.reshape(wide, ops.constant(np.array(weight.shape)), special_zero=False)
    return ops.convert(flat, np.float32).output(0)


def main() -> None:
    source, folder, dtype = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    kind = torch.bfloat16 if dtype == "bfloat16" else torch.float32
    stock = AutoModelForCausalLM.from_pretrained(source, dtype=kind, trust_remote_code=False)
    model = stock.float().eval()
    graph = export(model)
    if dtype in ("int8", "int4"):
        compress(graph, dtype)
    folder.mkdir(parents=True, exist_ok=True)
    ov.save_model(graph, folder / "openvino_model.xml", compress_to_fp16=False)
    model.config.save_pretrained(folder)


if __name__ == "__main__":
    main()
