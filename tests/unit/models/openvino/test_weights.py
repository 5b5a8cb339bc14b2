"""Weights in fewer bytes: rounded to eight and four bits, exact in bfloat16; joined products."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import pytest
import torch
from openvino import opset13 as ops
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

import pairs
from foretoken import load
from foretoken.certificate.identity import TOLERANCE
from foretoken.models.openvino import conversion, weights
from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import (
    GROUP,
    eight_bits,
    four_bits,
    halved,
    joined,
    widened_in_products,
)
from foretoken.models.rounding import REACHES, nearest
from foretoken.models.stock import selfcheck
from foretoken.models.stock.selfcheck import on_torch, stir

RANDOM = np.random.default_rng(0)


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(selfcheck, "FOUND", {})
    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}
    config = LlamaConfig(vocab_size=256, num_attention_heads=4, eos_token_id=None, **sizes)
    model = LlamaForCausalLM(config)
    stir(model)
    model.save_pretrained(tmp_path / "m")
    return str(tmp_path / "m")


@pytest.mark.parametrize("turned", [True, False])
def test_each_output_has_its_own_scale(turned: bool) -> None:
    weight = RANDOM.normal(size=(160, 128)).astype(np.float32)  # [out, in]
    weight[3] *= 1000
    weight[5] = 0
    operand = weight if turned else weight.T.copy()
    x = ops.parameter([-1, 128], np.float32)
    graph = eight_bits(ov.Model([ops.matmul(x, operand, False, turned)], [x], "g"))
    kinds = [op.get_element_type() for op in graph.get_ops() if op.get_type_name() == "Constant"]
    assert ov.Type.i8 in kinds
    state = np.eye(128, dtype=np.float32)
    product = ov.Core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})(state)[0].T
    step = np.abs(weight).max(1, keepdims=True) / 127
    assert np.all(np.abs(product - weight) <= 0.5 * step * (1 + 1e-3) + 1e-9)
    assert not np.array_equal(product, weight)


def test_small_weights_and_sums_stay() -> None:
    x = ops.parameter([-1, 8], np.float32)
    small = ops.matmul(x, RANDOM.normal(size=(8, 8)).astype(np.float32), False, True)
    graph = eight_bits(ov.Model([ops.add(small, np.ones(8, np.float32))], [x], "g"))
    kinds = {op.get_element_type() for op in graph.get_ops() if op.get_type_name() == "Constant"}
    assert kinds == {ov.Type.f32}


@pytest.mark.openvino
def test_a_target_in_eight_bits_is_a_model_of_its_own(path: str) -> None:
    """Speculation keeps its greedy text, whatever the draft."""
    whole = load(path, path, dtype="int8", draft_dtype="float32")
    assert whole.target.runtime == "openvino"
    (plain,) = whole.generate([5, 6, 7], max_new_tokens=24, gamma=0)
    (fast,) = whole.generate([5, 6, 7], max_new_tokens=24, gamma=3)
    assert fast.tokens == plain.tokens
    (sampled,) = whole.generate([5, 6, 7], max_new_tokens=24, gamma=3, temperature=1.0)
    alpha = sampled.stats.alpha
    assert alpha is not None and 0.8 < alpha < 1.0  # close to what it was made from, and another


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def kinds(graph: ov.Model) -> list[ov.Type]:
    """Of the graph's weights."""
    constants = [op for op in graph.get_ops() if op.get_type_name() == "Constant"]
    return [op.get_element_type() for op in constants if len(op.get_output_shape(0)) > 1]


def test_a_groups_scale_is_the_best_of_some() -> None:
    groups = normal(300, GROUP)
    groups[3] *= 1000
    groups[4] = 0
    groups[5] = 0
    groups[5, 7] = 3.0
    k, scale = nearest(groups)
    assert k.min() == -8 and k.max() <= 7 and k.dtype == np.int8 and scale.dtype == np.float16
    error = ((groups - scale.astype(np.float32) * k) ** 2).sum(1)
    assert error[4] == 0 and error[5] < 1e-5
    peak = np.take_along_axis(groups, np.abs(groups).argmax(1, keepdims=True), 1)
    for reach in REACHES:  # as good as each, rounded as it is
        first = -np.where(peak == 0, 1, peak) * reach / 8
        plain = ((groups - first * np.clip(np.rint(groups / first), -8, 7)) ** 2).sum(1)
        assert np.all(error <= plain * (1 + 2e-2) + 1e-6)
    exact = np.tile(np.arange(-8, 8, dtype=np.float32), (5, GROUP // 16)) * 0.25
    k, scale = nearest(exact)
    assert np.array_equal(scale.astype(np.float32) * k, exact)


def test_products_read_what_weights_are_rounded_to() -> None:
    first, last = normal(160, 128), normal(128, 160)
    x = ops.parameter([-1, 128], np.float32)
    inner = ops.matmul(x, first, False, True)
    graph = ov.Model([inner, ops.matmul(inner, last, False, True)], [x], "g")
    graph = four_bits(graph)
    assert sorted(map(str, kinds(graph))) == sorted(
        ["<Type: 'int4_t'>", "<Type: 'float16'>", "<Type: 'int8_t'>", "<Type: 'float32'>"]
    )
    ready = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    product = ready(np.eye(128, dtype=np.float32))[0].T
    k, scale = nearest(first.reshape(-1, GROUP))
    expected = (scale.astype(np.float32) * k).reshape(first.shape)
    assert np.allclose(product, expected, atol=1e-5)


def test_what_groups_do_not_divide_has_eight_bits() -> None:
    x = ops.parameter([-1, GROUP + 16], np.float32)
    inner = ops.matmul(x, normal(320, GROUP + 16), False, True)
    graph = four_bits(ov.Model([ops.matmul(inner, normal(320, 64), False, False)], [x], "g"))
    assert ov.Type.i4 not in kinds(graph) and kinds(graph).count(ov.Type.i8) == 2


def test_words_are_looked_up_in_eight_bits() -> None:
    weight = normal(300, 64)
    places = ops.parameter([-1], np.int64)
    graph = four_bits(ov.Model([ops.gather(weight, places, np.int64(0))], [places], "g"))
    assert ov.Type.i8 in kinds(graph)
    rows = core().compile_model(graph, "CPU")(np.array([7, 299, 7]))[0]
    step = np.abs(weight).max(1, keepdims=True) / 127
    expected = weight[[7, 299, 7]]
    assert np.all(np.abs(rows - expected) <= 0.5 * step[[7, 299, 7]] * (1 + 1e-3))
    assert not np.array_equal(rows, expected)


@pytest.mark.openvino
def test_a_target_in_four_bits_is_a_model_of_its_own(path: str) -> None:
    """Speculation keeps its greedy text, and the draft it was made from agrees with it mostly."""
    small = load(path, path, dtype="int4", draft_dtype="float32")
    assert small.target.computed == "int4"
    (plain,) = small.generate([5, 6, 7], max_new_tokens=24, gamma=0)
    (fast,) = small.generate([5, 6, 7], max_new_tokens=24, gamma=3)
    assert fast.tokens == plain.tokens
    (sampled,) = small.generate([5, 6, 7], max_new_tokens=48, gamma=3, temperature=1.0)
    alpha = sampled.stats.alpha
    assert alpha is not None and 0.5 < alpha < 1.0


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


def kinds_halves(graph: ov.Model) -> set[ov.Type]:
    return {op.get_element_type() for op in graph.get_ops() if op.get_type_name() == "Constant"}


def run(graph: ov.Model, x: np.ndarray) -> np.ndarray:
    return core().compile_model(widened_in_products(graph), "CPU", F32)(x)[0]


@pytest.mark.parametrize("turned", [True, False])
def test_half_the_bytes_and_the_same_numbers(turned: bool, tmp_path: Path) -> None:
    weight = matrix()
    operand = weight if turned else weight.T.copy()
    graph = halved(product(operand, turned))
    assert kinds_halves(graph) == {ov.Type.bf16}
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
    assert kinds_halves(halved(product(weight))) == {ov.Type.f32}


def test_what_is_not_only_multiplied_or_looked_up_stays() -> None:
    x = ops.parameter([160, 128], np.float32)
    weight: Any = ops.constant(matrix())
    graph = ov.Model([ops.matmul(x, weight, False, True), ops.add(x, weight)], [x], "g")
    assert kinds_halves(halved(graph)) == {ov.Type.f32}


def test_a_small_graph_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "WORTH_HALVING", 160 * 128 + 1)
    assert kinds_halves(halved(product(matrix()))) == {ov.Type.f32}


@pytest.mark.prove
@pytest.mark.openvino
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_a_model_of_bfloat16_computes_what_the_stock_model_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its logits are those of the stock model in float32, over ragged blocks, up to the rounding of
    what it says it computes in: a processor with bfloat16 arithmetic uses it."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("foretoken.models.openvino.weights.WORTH", 64)  # of a single matrix
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
    assert all(ov.Type.bf16 in kinds_halves(graph) for graph in made) and made


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


def outputs(graph: ov.Model, states: np.ndarray) -> list[np.ndarray]:
    compiled = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled(states)
    return [results[i] for i in range(len(graph.outputs))]


def products(graph: ov.Model) -> int:
    return Counter(op.get_type_name() for op in graph.get_ops())["MatMul"]


@pytest.mark.parametrize(
    ("biased", "turned", "left"),
    [((0, 0, 0), (1, 1, 1), 1), ((1, 1, 1), (1, 1, 1), 1), ((1, 0, 1), (1, 1, 1), 1)]
    + [((0, 0, 0), (1, 1, 0), 2)],
)
def test_what_reads_the_same_states_is_one_product(biased, turned, left) -> None:
    x = ops.parameter([-1, 24], np.float32)
    made = []
    for size, bias, turn in zip((16, 8, 40), biased, turned, strict=True):
        weight = normal(size, 24) if turn else normal(24, size)
        product = ops.matmul(x, weight, False, bool(turn))
        made.append(
            ops.add(normal(1, size), product) if bias else ops.multiply(product, np.float32(2))
        )
    graph, states = ov.Model(made, [x], "g"), normal(5, 24)
    apart = outputs(graph, states)
    assert products(joined(graph)) == left
    for one, other in zip(apart, outputs(graph, states), strict=True):
        assert np.allclose(one, other, atol=1e-5)


def test_states_of_their_own_stay_apart() -> None:
    x, y = ops.parameter([-1, 8], np.float32), ops.parameter([-1, 8], np.float32)
    nodes = [ops.matmul(states, normal(8, 8), False, True) for states in (x, y)]
    assert products(joined(ov.Model(nodes, [x, y], "g"))) == 2
    halves = ops.split(x, ops.constant(1), 2)
    nodes = [ops.matmul(half, normal(8, 4), False, True) for half in halves.outputs()]
    assert products(joined(ov.Model(nodes, [x], "g"))) == 2


def test_a_sum_that_makes_another_shape_is_no_bias() -> None:
    x = ops.parameter([-1, 24], np.float32)
    nodes = [ops.add(ops.matmul(x, normal(5, 24), False, True), normal(5, 1)) for _ in range(2)]
    graph, states = ov.Model(nodes, [x], "g"), normal(5, 24)
    apart = outputs(graph, states)
    assert products(joined(graph)) == 1  # the products alone
    for one, other in zip(apart, outputs(graph, states), strict=True):
        assert np.allclose(one, other, atol=1e-5)
