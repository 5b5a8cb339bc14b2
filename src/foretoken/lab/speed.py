"""Which precision is fastest here, by a model's size: passes over stacks of linear layers.

The weights are random, in the forms that conversions give them, and compiled as models are on
OpenVINO. Attention and the output layer are left out, so a model's pass takes longer; which
precision is faster follows from the weights. Needs OpenVINO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops

from foretoken.loading.memory import free_bytes
from foretoken.models.blocks import Blocks, Floats
from foretoken.models.onnx.graph import Graph
from foretoken.models.onnx.passes import session
from foretoken.models.onnx.products import PRECISIONS, Weight, product
from foretoken.models.openvino.conversion import settings
from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import (
    GROUP,
    WORTH_HALVING,
    in_groups,
    scaled,
    widened,
    widened_in_products,
)
from foretoken.models.rounding import nearest, whole

STACK = "stack"
TOKENS = (1, 8)  # of a pass: plain decoding, and a target that scores seven guesses
SECONDS = 16.0  # nothing is begun that is expected to end later
LEAST, ENOUGH = 3, 0.2  # passes that are timed at least, and seconds after which they suffice
BYTES = {"float32": 4.0, "bfloat16": 4.0, "int8": 1.0, "int4": 0.6}  # of a weight, in memory
COPIES = 2.5  # of the weights while they are compiled


@dataclass(frozen=True, slots=True)
class LinearStack:
    """Square linear layers, one behind the other."""

    width: int
    layers: int

    @property
    def parameters(self) -> int:
        return self.width**2 * self.layers


STACKS = (LinearStack(512, 38), LinearStack(1024, 95), LinearStack(2048, 95))


@dataclass(frozen=True, slots=True)
class PrecisionSpeed:
    """Seconds of a pass over each of `TOKENS`; None where time or memory did not suffice."""

    parameters: int
    dtype: str
    runtime: str
    seconds: tuple[float, ...] | None


def speeds(stacks: tuple[LinearStack, ...], seconds: float = SECONDS) -> Iterator[PrecisionSpeed]:
    """Every stack in every precision, the smallest first: what is left out at the end is large."""
    first, took = perf_counter(), dict[str, float]()
    for stack in stacks:
        for way in WAYS:
            dtype, runtime = way
            start = perf_counter()
            late = start - first + took.get(f"{way}", 0.0) * stack.parameters > seconds
            if late or not _fits(stack, dtype):
                yield PrecisionSpeed(stack.parameters, *way, None)
                continue
            times = (on_onnx if runtime == "onnx" else timed)(stack, dtype)
            making = perf_counter() - start - len(TOKENS) * ENOUGH
            took[f"{way}"] = max(0.0, making) / stack.parameters
            yield PrecisionSpeed(stack.parameters, *way, times)


def on_onnx(stack: LinearStack, dtype: str) -> tuple[float, ...]:
    """Median seconds of a pass over each of `TOKENS` on ONNX Runtime."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        layers, weight = Graph(Path(folder), STACK), _drawn(stack)
        states = layers.input("vectors", "float32", "n", stack.width)
        precision = PRECISIONS[dtype]
        kept = precision.kept(weight)
        for i in range(stack.layers):
            states = product(layers, f"layer.{i}", states, rolled(kept, i), None, precision)
        layers.output(states, "float32", "n", stack.width)
        layers.written()
        ready = session(Path(folder), STACK)
        given = (np.ones((n, stack.width), np.float32) for n in TOKENS)
        return tuple(_median(partial(ready.run, None, {"vectors": vectors})) for vectors in given)


def rolled(weight: Weight, places: int) -> Weight:
    """The same with its rows moved on."""
    if not isinstance(weight, Blocks):
        return np.roll(weight, places, 0)
    moved = np.roll(weight.integers, places, 0), np.roll(weight.scales, places, 0)
    return Blocks(*moved, None)


def timed(stack: LinearStack, dtype: str) -> tuple[float, ...]:
    """Median seconds of a pass over each of `TOKENS` on OpenVINO."""
    compiled = core().compile_model(
        widened_in_products(graph(stack, dtype)), "CPU", settings(dtype)
    )
    request = compiled.create_infer_request()
    given = (np.ones((n, stack.width), np.float32) for n in TOKENS)
    return tuple(_median(partial(request.infer, [vectors])) for vectors in given)


def graph(stack: LinearStack, dtype: str) -> ov.Model:
    """The stack as a graph, from vectors `[n, width]` to as many."""
    layer = LAYERS[dtype](_drawn(stack), stack)
    vectors = ops.parameter([-1, stack.width], np.float32, name="vectors")
    product: Any = vectors
    for i in range(stack.layers):
        product = ops.matmul(product, layer(i), False, True)
    make: Any = ov.Model  # its own types do not fit together
    return make([product], [vectors], "stack")


def _drawn(stack: LinearStack) -> Floats:
    """A random weight behind which vectors keep their length."""
    weight = np.random.default_rng(0).standard_normal((stack.width,) * 2, dtype=np.float32)
    return weight / np.float32(stack.width**0.5)


Layer = Callable[[int], Any]
# The weight of layer i is the first one's with its rows moved on, so that each is read from memory
# of its own and only one is drawn and rounded


def _float32(weight: Any, stack: LinearStack) -> Layer:
    return lambda i: ops.constant(np.roll(weight, i, 0))


def _bfloat16(weight: Any, stack: LinearStack) -> Layer:
    narrow = torch.from_numpy(weight).bfloat16()
    if stack.parameters < WORTH_HALVING:  # as conversions keep them
        return _float32(narrow.float().numpy(), stack)
    return lambda i: widened(narrow.roll(i, 0))


def _int8(weight: Any, stack: LinearStack) -> Layer:
    integers, scale = whole(weight, 1)
    return lambda i: scaled(np.roll(integers, i, 0), np.roll(scale, i, 0))


def _int4(weight: Any, stack: LinearStack) -> Layer:
    integers, scales = nearest(weight.reshape(-1, GROUP))
    integers, scales = integers.reshape(weight.shape), scales.reshape(len(weight), -1)
    return lambda i: in_groups(np.roll(integers, i, 0), np.roll(scales, i, 0))


LAYERS = {"int4": _int4, "int8": _int8, "bfloat16": _bfloat16, "float32": _float32}
WAYS = [
    (dtype, runtime)
    for dtype in LAYERS
    for runtime in ("onnx", "openvino")
    if runtime == "openvino" or dtype in PRECISIONS
]


def _fits(stack: LinearStack, dtype: str) -> bool:
    free = free_bytes(torch.device("cpu"))
    return free is None or COPIES * BYTES[dtype] * stack.parameters < free


def _median(run: Callable[[], Any]) -> float:
    run()  # lays out its layers for this size
    times: list[float] = []
    while len(times) < LEAST or sum(times) < ENOUGH:
        start = perf_counter()
        run()
        times.append(perf_counter() - start)
    return median(times)
