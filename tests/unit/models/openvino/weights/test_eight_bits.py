"""Weights as integers: what they are rounded to, and that a whole model still runs on them."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest
from openvino import opset13 as ops

from foretoken import load
from foretoken.models.openvino.weights import eight_bits

RANDOM = np.random.default_rng(0)


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
