"""Products that read the same states: joined they give the same numbers; others stay apart."""

from __future__ import annotations

from collections import Counter

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import joined

RANDOM = np.random.default_rng(0)


def normal(*shape: int) -> np.ndarray:
    return RANDOM.normal(size=shape).astype(np.float32)


def outputs(graph: ov.Model, states: np.ndarray) -> list[np.ndarray]:
    compiled = core().compile_model(graph, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})
    results = compiled(states)
    return [results[i] for i in range(len(graph.outputs))]


def products(graph: ov.Model) -> int:
    return Counter(op.get_type_name() for op in graph.get_ops())["MatMul"]


@pytest.mark.parametrize(
    ("biased", "turned", "left"),
    [((0, 0, 0), (1, 1, 1), 1), ((1, 1, 1), (1, 1, 1), 1), ((1, 0, 1), (1, 1, 1), 3)]
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
