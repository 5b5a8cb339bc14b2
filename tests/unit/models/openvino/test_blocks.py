"""Weights in blocks of integers: recognised to the bit, read as they are."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, quants
from openvino import opset13 as ops

import foretoken
from foretoken.models.blocks import Blocks, found
from foretoken.models.openvino import conversion
from foretoken.models.openvino.blocks import kept
from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import four_bits, joined
from gguf_file import write_gguf
from tiny import byte_level, llama

RANDOM = np.random.default_rng(0)
SHAPE = (160, 512)
# how many bits an integer takes, the weights in a block, and whether it has an offset
WRITTEN = {
    "Q4_0": (4, 32, False),
    "Q4_1": (4, 32, True),
    "Q5_0": (8, 32, False),
    "Q5_1": (8, 32, True),
    "Q8_0": (8, 32, False),
    "TQ2_0": (4, 32, False),
}
# where a block of 256 holds its numbers in float16; the other bytes may be any
PACKED = {
    "Q2_K": ((80, 82), (4, 16, True)),
    "Q3_K": ((108,), (4, 16, False)),
    "Q4_K": ((0, 2), (4, 32, True)),
    "Q5_K": ((0, 2), (8, 32, True)),
    "Q6_K": ((208,), (8, 16, False)),
    "IQ4_NL": ((0,), (8, 32, False)),
    "IQ4_XS": ((0,), (8, 32, False)),
}


def values(kind: str, shape: tuple[int, int] = SHAPE) -> np.ndarray:
    """Weights as a file holds them in blocks of this kind."""
    name = GGMLQuantizationType[kind]
    if kind not in PACKED:
        weight = RANDOM.normal(0, 0.02, shape).astype(np.float32)
        return quants.dequantize(quants.quantize(weight, name), name).astype(np.float32)
    size, length = GGML_QUANT_SIZES[name]
    raw = RANDOM.integers(0, 256, (shape[0], shape[1] // size, length), dtype=np.uint8)
    for place in PACKED[kind][0]:
        scale = RANDOM.uniform(1e-3, 2e-2, (*raw.shape[:2], 1)).astype(np.float16)
        raw[..., place : place + 2] = scale.view(np.uint8)
    return quants.dequantize(raw.reshape(shape[0], -1), name).astype(np.float32)


def read(blocks: Blocks) -> np.ndarray:
    plain = blocks.integers.astype(np.float32) * blocks.scales
    plain = plain if blocks.offsets is None else plain + blocks.offsets
    return plain.reshape(len(plain), -1)


@pytest.mark.parametrize(
    ("kind", "form"), [*WRITTEN.items(), *((name, form) for name, (_, form) in PACKED.items())]
)
def test_blocks_of_files_are_found_to_the_bit(kind: str, form: tuple[int, int, bool]) -> None:
    weight = values(kind)
    blocks = found(weight)
    assert blocks is not None and np.array_equal(read(blocks), weight)
    assert (blocks.bits, blocks.integers.shape[2], blocks.offsets is not None) == form
    weight[37, 101] = np.nextafter(weight[37, 101], np.float32(1))  # the negative control
    changed = found(weight)
    assert changed is None or np.array_equal(read(changed), weight)
    assert changed is None or kind not in WRITTEN


@pytest.mark.parametrize("weight", [np.zeros(SHAPE), np.full(SHAPE, 0.3), np.full(SHAPE, np.nan)])
def test_weights_of_one_value(weight: np.ndarray) -> None:
    weight = weight.astype(np.float32)
    blocks = found(weight)
    assert (blocks is None) == np.isnan(weight).any()
    assert blocks is None or np.array_equal(read(blocks), weight)


def test_ordinary_weights_stay() -> None:
    weight = RANDOM.normal(size=SHAPE).astype(np.float32)
    weight[:40] = values("Q4_0")[:40]  # some rows of blocks do not suffice
    assert found(weight) is None and found(weight[:, :100]) is None
    graph = kept(multiplied(weight))
    assert kinds(graph) == {"f32"}


def multiplied(weight: np.ndarray, *, turned: bool = True) -> ov.Model:
    x = ops.parameter([-1, -1, SHAPE[1]], np.float32)
    operand = weight if turned else np.ascontiguousarray(weight.T)
    return ov.Model([ops.matmul(x, operand, False, turned)], [x], "g")


def kinds(graph: ov.Model) -> set[str]:
    """The types of weights, but of lengths."""
    constants = [op for op in graph.get_ops() if op.get_type_name() == "Constant"]
    types = Counter(op.get_element_type().get_type_name() for op in constants)
    return set(types) - {"i64"}


def run(graph: ov.Model, states: np.ndarray) -> list[np.ndarray]:
    options = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    outputs = core().compile_model(graph, "CPU", options)(states)
    return [outputs[i] for i in range(len(graph.outputs))]


@pytest.mark.parametrize(
    ("kind", "types"),
    [("Q4_0", {"i4", "f16"}), ("Q4_1", {"i4", "f16", "f32"}), ("Q8_0", {"i8", "f16"})]
    + [("Q4_K", {"i4", "f32"}), ("Q6_K", {"i8", "f32"})],
)
def test_products_in_float32_read_blocks(kind: str, types: set[str], tmp_path: Path) -> None:
    weight = values(kind)
    graph = kept(multiplied(weight))
    assert kinds(graph) in (types, {"u4", *types} - {"i4"})
    ov.save_model(graph, tmp_path / "g.xml", compress_to_fp16=False)
    again = core().read_model(tmp_path / "g.xml")
    states = RANDOM.normal(size=(2, 5, SHAPE[1])).astype(np.float32)
    exact = states.astype(np.float64) @ weight.T.astype(np.float64)
    size = np.abs(states).max() * np.abs(weight).sum(1).max()
    for each in (graph, again):
        assert np.abs(run(each, states)[0] - exact).max() < 1e-6 * size


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_rows_are_looked_up_in_blocks(kind: str) -> None:
    weight = values(kind)
    ids = ops.parameter([-1, -1], np.int64)
    rows = ops.gather(ops.constant(weight), ids, ops.constant(0))
    graph = kept(ov.Model([rows], [ids], "g"))
    assert "i8" in kinds(graph)
    chosen = RANDOM.integers(0, len(weight), (3, 4))
    assert np.array_equal(run(graph, chosen)[0], weight[chosen])


def test_blocks_of_more_bits_than_asked_for_are_rounded() -> None:
    weight = values("Q8_0")
    x = ops.parameter([-1, SHAPE[1]], np.float32)
    head = ops.constant(RANDOM.normal(size=(128, SHAPE[0])).astype(np.float32))
    inner = ops.matmul(x, ops.constant(weight), False, True)
    graph = four_bits(kept(ov.Model([ops.matmul(inner, head, False, True)], [x], "g"), 4))
    assert "i4" in kinds(graph)
    assert "i4" not in kinds(kept(multiplied(weight), 8))


def test_products_keep_no_offsets_where_these_take_longer_than_eight_bits() -> None:
    """Look-ups, which add none to any product, keep theirs, also of the same weight."""
    ids, x = ops.parameter([-1, -1], np.int64), ops.parameter([-1, SHAPE[1]], np.float32)
    weight: Any = ops.constant(values("Q4_1"))
    made = [ops.gather(weight, ids, ops.constant(0)), ops.matmul(x, weight, False, True)]
    graph = kept(ov.Model(made, [ids, x], "g"), offsets=False)
    assert "i8" in kinds(graph)
    (product,) = (op for op in graph.get_ops() if op.get_type_name() == "MatMul")
    assert product.input_value(1).get_node().get_type_name() == "Constant"
    assert kinds(kept(multiplied(values("Q4_1")), offsets=False)) == {"f32"}
    assert "i4" in kinds(kept(multiplied(values("Q4_0")), offsets=False))
    several = [ops.matmul(x, values(kind), False, True) for kind in ("Q4_K", "Q6_K")]
    assert kinds(kept(joined(ov.Model(several, [x], "g")), offsets=False)) == {"f32"}


def test_a_weight_that_is_used_otherwise_stays() -> None:
    weight = values("Q4_0")
    assert kinds(kept(multiplied(weight, turned=False))) == {"f32"}
    x, constant = ops.parameter([-1, SHAPE[1]], np.float32), ops.constant(weight)
    both = [ops.matmul(x, constant, False, True), ops.negative(constant)]
    assert kinds(kept(ov.Model(both, [x], "g"))) == {"f32"}


@pytest.mark.parametrize("biased", [False, True])
def test_joined_products_of_several_kinds(biased: bool) -> None:
    """As in files whose values of attention have more bits than queries and keys."""
    x = ops.parameter([-1, SHAPE[1]], np.float32)
    weights = [values("Q4_K"), values("Q6_K"), RANDOM.normal(size=SHAPE).astype(np.float32)]
    products: list[Any] = [ops.matmul(x, weight, False, True) for weight in weights]
    if biased:
        products = [ops.add(each, np.ones((1, len(weights[0])), np.float32)) for each in products]
    graph = kept(joined(ov.Model(products, [x], "g")))
    assert {"i8", "f32"} < kinds(graph)
    states = RANDOM.normal(size=(5, SHAPE[1])).astype(np.float32)
    for made, weight in zip(run(graph, states), weights, strict=True):
        exact = states.astype(np.float64) @ weight.T + biased
        assert np.abs(made - exact).max() < 1e-5 * np.abs(exact).max()


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
@pytest.mark.parametrize("dtype", ["float32", "int8", "int4"])
def test_a_file_is_read_in_its_blocks(
    kind: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    made: list[ov.Model] = []
    monkeypatch.setattr(
        conversion, "kept", lambda *given, **named: made.append(kept(*given, **named)) or made[-1]
    )
    model = llama(320, hidden_size=128, intermediate_size=256)
    file = tmp_path / "tiny.gguf"
    write_gguf(file, model, byte_level(), GGMLQuantizationType[kind])
    spec = foretoken.load(file, "lookup", runtime="openvino", dtype=dtype)
    assert ("i4" in kinds(made[-1])) == ((kind, dtype) != ("Q4_1", "int8"))
    assert spec.target.computed == dtype
    plain = foretoken.load(file, "none", runtime="transformers")
    prompt = [list(range(1, 30))]
    (text,) = spec.generate(prompt, max_new_tokens=12)
    assert dtype != "float32" or text.tokens == plain.generate(prompt, max_new_tokens=12)[0].tokens
