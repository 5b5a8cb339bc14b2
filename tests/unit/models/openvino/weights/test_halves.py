"""Weights kept as bfloat16: only where none changes, and only where they are read as they are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset13 as ops
from transformers import AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

import pairs
from foretoken import load
from foretoken.lab.certificate.identity import TOLERANCE
from foretoken.models.openvino import conversion, weights
from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import halved, widened_in_products
from foretoken.models.stock.selfcheck import on_torch

F32 = {"INFERENCE_PRECISION_HINT": "f32"}


@pytest.fixture(autouse=True)
def small_ones_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WORTH_HALVING", 0)


def matrix(rows: int = 160, columns: int = 128) -> np.ndarray:
    random = torch.Generator().manual_seed(0)
    return torch.randn(rows, columns, generator=random).bfloat16().float().numpy()


def product(weight: np.ndarray, turned: bool = True) -> ov.Model:
    x = ops.parameter([-1, 128], np.float32)
    return ov.Model([ops.matmul(x, weight, False, turned)], [x], "g")


def kinds(graph: ov.Model) -> set[ov.Type]:
    return {op.get_element_type() for op in graph.get_ops() if op.get_type_name() == "Constant"}


def run(graph: ov.Model, x: np.ndarray) -> np.ndarray:
    return core().compile_model(widened_in_products(graph), "CPU", F32)(x)[0]


@pytest.mark.parametrize("turned", [True, False])
def test_half_the_bytes_and_the_same_numbers(turned: bool, tmp_path: Path) -> None:
    weight = matrix()
    operand = weight if turned else weight.T.copy()
    graph = halved(product(operand, turned))
    assert kinds(graph) == {ov.Type.bf16}
    assert np.array_equal(run(graph, np.eye(128, dtype=np.float32)).T, weight)
    ov.save_model(graph, tmp_path / "g.xml", compress_to_fp16=False)
    again = core().read_model(tmp_path / "g.xml")
    x = np.random.default_rng(1).normal(size=(5, 128)).astype(np.float32)
    np.testing.assert_allclose(run(again, x), x @ weight.T, rtol=0, atol=1e-4)


def test_products_read_them_as_they_are() -> None:
    """Without the mark they are float32 in memory, and nothing is gained."""
    assert "bf16" in held(widened_in_products(halved(product(matrix()))))
    assert "bf16" not in held(halved(product(matrix())))


def held(graph: ov.Model) -> set[str]:
    """The types of constants in what the graph was compiled to."""
    nodes = core().compile_model(graph, "CPU", F32).get_runtime_model().get_ops()
    facts = [node.get_rt_info() for node in nodes]
    return {
        fact["outputPrecisions"].astype(str)
        for fact in facts
        if fact["layerType"].astype(str) == "Const"
    }


def test_a_weight_that_would_be_rounded_stays() -> None:
    weight = matrix()
    weight[7, 7] = 1 + 2**-10
    assert kinds(halved(product(weight))) == {ov.Type.f32}


def test_what_is_not_only_multiplied_or_looked_up_stays() -> None:
    x = ops.parameter([160, 128], np.float32)
    weight: Any = ops.constant(matrix())
    graph = ov.Model([ops.matmul(x, weight, False, True), ops.add(x, weight)], [x], "g")
    assert kinds(halved(graph)) == {ov.Type.f32}


def test_a_small_graph_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WORTH_HALVING", 160 * 128 + 1)
    assert kinds(halved(product(matrix()))) == {ov.Type.f32}


@pytest.mark.openvino
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_a_model_of_bfloat16_computes_what_the_stock_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are those of the stock model in float32, over ragged blocks, up to the rounding of
    what it says it computes in: a processor with bfloat16 arithmetic uses it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("foretoken.models.openvino.weights.WORTH_HALVING", 64)  # of a single matrix
    made: list[ov.Model] = []
    monkeypatch.setattr(
        "foretoken.models.openvino.conversion.halved",
        lambda graph: made.append(graph) or halved(graph),
    )
    kind = AutoModelForSeq2SeqLM if name == "T5" else AutoModelForCausalLM
    pairs.random(name, 0).bfloat16().save_pretrained(tmp_path / "m")
    stock: PreTrainedModel = kind.from_pretrained(tmp_path / "m", dtype=torch.float32).eval()
    for dtype in ("float32", "bfloat16"):
        spec = load(str(tmp_path / "m"), "none", dtype=dtype)
        assert spec.target.runtime == "openvino"
        models = spec.target, on_torch(stock)
        logits = [read(model, name == "T5") for model in models]
        height = (logits[1].amax(-1) - logits[1].mean(-1)).mean()
        assert spec.target.computed == ("float32" if dtype == "float32" else arithmetic())
        assert (logits[0] - logits[1]).abs().max() < TOLERANCE[spec.target.computed] * height
    assert all(ov.Type.bf16 in kinds(graph) for graph in made) and made


@pytest.mark.openvino
def test_what_is_computed_in_is_what_the_compiled_graph_says(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Not what was asked for: a processor without bfloat16 arithmetic is asked for it here."""
    settings = conversion.settings
    hints = {"INFERENCE_PRECISION_HINT": "bf16"}
    monkeypatch.setattr(conversion, "settings", lambda *given: settings(*given) | hints)
    model = conversion.EXPLICIT.run(pairs.random("T5", 0).float())
    assert model.computed == arithmetic()


def arithmetic() -> str:
    """What a graph that is asked to be bfloat16 computes in here."""
    hint = {"INFERENCE_PRECISION_HINT": "bf16"}
    return conversion.arithmetic(core().compile_model(product(matrix()), "CPU", hint))


def read(model: Any, encoder_decoder: bool) -> torch.Tensor:
    prompts = [[0], [0]] if encoder_decoder else [[5, 17, 33], [60, 12]]
    model.start(prompts, [[5, 17, 33], [60, 12, 7, 9]] if encoder_decoder else None)
    blocks = [[1, 2, 3], [4]]
    logits = model.score(blocks, [3, 1])
    return torch.cat([logits[0], logits[1, :1]]).clone()
