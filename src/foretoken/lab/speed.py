"""Which precision is fastest here, by a model's size: passes over stacks of linear layers.

The weights are random, in the forms that conversions give them, and compiled as models are on
OpenVINO. Attention and the output layer are left out, so a model's pass takes longer; which
precision is faster follows from the weights. Needs OpenVINO.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import median
from time import perf_counter
from typing import Any

import numpy as np
import openvino as ov
import torch
from openvino import opset13 as ops

from foretoken.loading.memory import free_bytes
from foretoken.models.openvino.conversion import settings
from foretoken.models.openvino.tracing import core
from foretoken.models.openvino.weights import (
    GROUP,
    WORTH_HALVING,
    in_groups,
    nearest,
    scaled,
    whole,
    widened,
    widened_in_products,
)

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
    seconds: tuple[float, ...] | None


def speeds(stacks: tuple[LinearStack, ...], seconds: float = SECONDS) -> Iterator[PrecisionSpeed]:
    """Every stack in every precision, the smallest first: what is left out at the end is large."""
    first, took = perf_counter(), dict[str, float]()
    for stack in stacks:
        for dtype in LAYERS:
            start = perf_counter()
            late = start - first + took.get(dtype, 0.0) * stack.parameters > seconds
            if late or not _fits(stack, dtype):
                yield PrecisionSpeed(stack.parameters, dtype, None)
                continue
            times = timed(stack, dtype)
            making = perf_counter() - start - len(TOKENS) * ENOUGH
            took[dtype] = max(0.0, making) / stack.parameters
            yield PrecisionSpeed(stack.parameters, dtype, times)


def timed(stack: LinearStack, dtype: str) -> tuple[float, ...]:
    """Median seconds of a pass over each of `TOKENS`."""
    compiled = core().compile_model(
        widened_in_products(graph(stack, dtype)), "CPU", settings(dtype)
    )
    request = compiled.create_infer_request()
    return tuple(_pass(request, np.ones((n, stack.width), np.float32)) for n in TOKENS)


def graph(stack: LinearStack, dtype: str) -> ov.Model:
    """The stack as a graph, from vectors `[n, width]` to as many."""
    weight = np.random.default_rng(0).standard_normal((stack.width,) * 2, dtype=np.float32)
    layer = LAYERS[dtype](weight / stack.width**0.5, stack)  # vectors keep their length
    vectors = ops.parameter([-1, stack.width], np.float32, name="vectors")
    product: Any = vectors
    for i in range(stack.layers):
        product = ops.matmul(product, layer(i), False, True)
    make: Any = ov.Model  # its own types do not fit together
    return make([product], [vectors], "stack")


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


def _fits(stack: LinearStack, dtype: str) -> bool:
    free = free_bytes(torch.device("cpu"))
    return free is None or COPIES * BYTES[dtype] * stack.parameters < free


def _pass(request: ov.InferRequest, vectors: Any) -> float:
    request.infer([vectors])  # lays out its layers for this size
    times: list[float] = []
    while len(times) < LEAST or sum(times) < ENOUGH:
        start = perf_counter()
        request.infer([vectors])
        times.append(perf_counter() - start)
    return median(times)
