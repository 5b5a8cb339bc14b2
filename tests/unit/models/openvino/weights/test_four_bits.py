"""Weights in four bits: what they are rounded to, what keeps eight, that a model runs on them."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from foretoken import load
from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import GROUP, REACHES, four_bits, nearest

RANDOM = np.random.default_rng(0)


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
