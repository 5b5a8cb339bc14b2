"""Stacks of linear layers in every precision: that they compute one product after another, and that
what time or memory do not suffice for is left out."""

from __future__ import annotations

import numpy as np
import openvino as ov
import pytest

from foretoken.lab import speed
from foretoken.lab.speed import TOKENS, WAYS, LinearStack, PrecisionSpeed, graph, speeds
from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import widened_in_products

pytestmark = pytest.mark.openvino
SMALL = LinearStack(128, 3)


@pytest.fixture(autouse=True)
def hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed, "ENOUGH", 0.0)


def run(made: ov.Model, x: np.ndarray) -> np.ndarray:
    exact = {"INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": "0"}
    compiled = core().compile_model(widened_in_products(made), "CPU", exact)
    return compiled([x])[0]


@pytest.mark.parametrize(
    ("dtype", "error", "kind"),
    [
        ("float32", 1e-5, "f32"),
        ("bfloat16", 0.02, "bf16"),
        ("int8", 0.05, "i8"),
        ("int4", 0.3, "i4"),
    ],
)
def test_a_stack_is_the_same_layers_in_any_precision(
    monkeypatch: pytest.MonkeyPatch, dtype: str, error: float, kind: str
) -> None:
    monkeypatch.setattr(speed, "WORTH_HALVING", 0)
    random = np.random.default_rng(0)
    weight = random.standard_normal((128, 128), dtype=np.float32) / 128**0.5
    x = random.standard_normal((2, 128), dtype=np.float32)
    expected = x
    for i in range(SMALL.layers):
        expected = expected @ np.roll(weight, i, 0).T
    network = graph(SMALL, dtype)
    kinds = [n.get_element_type() for n in network.get_ops() if n.get_type_name() == "Constant"]
    assert sum(each.to_string() == kind for each in kinds) >= SMALL.layers
    assert np.linalg.norm(run(network, x) - expected) < error * np.linalg.norm(expected)


def test_every_size_and_precision_is_timed() -> None:
    rows = list(speeds((LinearStack(64, 1), SMALL)))
    assert [(each.parameters, each.dtype, each.runtime) for each in rows] == [
        (size, *way) for size in (64**2, 3 * 128**2) for way in WAYS
    ]
    assert all(each.seconds and len(each.seconds) == len(TOKENS) for each in rows)
    assert all(min(each.seconds or (0,)) > 0 for each in rows)


def test_what_time_or_memory_do_not_suffice_for_is_left_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert list(speeds((SMALL,), seconds=-1)) == [
        PrecisionSpeed(SMALL.parameters, *way, None) for way in WAYS
    ]
    monkeypatch.setattr(speed, "free_bytes", lambda device: 100_000)
    timed = {each.dtype: each.seconds is not None for each in speeds((SMALL,))}
    assert timed == {"int4": True, "int8": False, "bfloat16": False, "float32": False}
