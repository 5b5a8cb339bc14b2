"""Products of states and weights in an ONNX graph, in a precision.

Weights in blocks of integers, of `models.blocks` or rounded here, go through ONNX Runtime's
MatMulNBits. Eight bits: blocks of 32 with a scale each, w is read as scale * round(w / scale). Four
bits: the same with the scale of the least squared error (`models.rounding`); the output layer,
whose rounding is seen in the distribution itself, has eight. With these, states are rounded to
eight bits by blocks as they are multiplied; with float32 they are not.

Offsets of blocks need the sums of the states by block. In float32 they are a product of their own.
Where states are rounded, the sums stand behind the states, are rounded as these are and multiplied
with them, which takes a fifth less time: whole steps of an offset are the block's zero point, and
the rest, a step at most, is a weight of the block's sum, in eight bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.models.blocks import Blocks, Floats, found
from foretoken.models.onnx.graph import Graph
from foretoken.models.rounding import nearest, whole

BLOCK = 32  # weights that share a scale
ROWS = 4096  # outputs that are rounded at a time, which bounds memory
WIDE, ROUNDED = 1, 4  # accuracy levels of MatMulNBits: states in float32, or in eight bits
Weight = Floats | Blocks


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight `[out, in]` and what is added, `[out]`."""

    weight: Floats
    bias: Floats | None = None


@dataclass(frozen=True, slots=True)
class Precision:
    """Weights of products are kept as they are, or rounded to so many bits."""

    bits: int | None = None

    def kept(self, weight: Floats) -> Weight:
        """A weight in its own blocks where it has some of no more bits, else as it is kept here."""
        blocks = found(weight)
        # float32 states times integers of eight bits take longer than float32 weights
        if blocks is not None and blocks.bits <= (self.bits or 4):
            return blocks
        whole_blocks = weight.shape[1] % BLOCK == 0
        return rounded(weight, self.bits) if self.bits and whole_blocks else weight

    @property
    def level(self) -> int:
        return WIDE if self.bits is None else ROUNDED


PRECISIONS = {"float32": Precision(), "int8": Precision(8), "int4": Precision(4)}


@dataclass(frozen=True, slots=True)
class Stored:
    """Blocks as MatMulNBits reads them: integers from 0, and what is subtracted from a block's."""

    integers: NDArray[np.uint8]  # [out, blocks, size]
    scales: Floats  # [out, blocks]
    zeros: NDArray[np.uint8]  # [out, blocks]


def rounded(weight: Floats, bits: int) -> Blocks:
    """The nearest weight of so many bits, in blocks."""
    out = len(weight)
    make = nearest if bits == 4 else partial(whole, axis=1)
    parts = [make(weight[i : i + ROWS].reshape(-1, BLOCK)) for i in range(0, out, ROWS)]
    integers = np.concatenate([k for k, _ in parts]).reshape(out, -1, BLOCK)
    scales = np.concatenate([scale for _, scale in parts]).reshape(out, -1, 1)
    return Blocks(integers, scales.astype(np.float32), None)


def multiplied(
    graph: Graph, name: str, states: str, linears: list[Linear], precision: Precision
) -> str:
    """The outputs of layers that read the same states, one behind another."""
    kept = [precision.kept(linear.weight) for linear in linears]
    biases = [linear.bias for linear in linears]
    if len({_form(weight) for weight in kept}) == 1:
        return product(graph, name, states, _joined(kept), _joined_biases(linears), precision)
    parts = [
        product(graph, f"{name}.{i}", states, weight, bias, precision)
        for i, (weight, bias) in enumerate(zip(kept, biases, strict=True))
    ]
    return graph.add("Concat", parts, name, axis=-1)


def _form(weight: Weight) -> tuple[Any, ...]:
    """The properties that weights must share to be one product."""
    if not isinstance(weight, Blocks):
        return ()
    size = weight.integers.shape[2]
    return size, weight.bits, weight.offsets is None, bool(weight.integers.min() >= 0)


def _joined(weights: list[Any]) -> Weight:
    if not isinstance(weights[0], Blocks):
        return np.concatenate(weights)
    offsets = [weight.offsets for weight in weights]
    return Blocks(
        np.concatenate([weight.integers for weight in weights]),
        np.concatenate([weight.scales for weight in weights]),
        None if offsets[0] is None else np.concatenate(offsets),
    )


def _joined_biases(linears: list[Linear]) -> Floats | None:
    if all(linear.bias is None for linear in linears):
        return None
    zeros = (np.zeros(len(linear.weight), np.float32) for linear in linears)
    pairs = zip(linears, zeros, strict=True)
    return np.concatenate([zero if x.bias is None else x.bias for x, zero in pairs])


def product(
    graph: Graph, name: str, states: str, weight: Weight, bias: Floats | None, precision: Precision
) -> str:
    """The product of states and a weight as it is kept, and what is added."""
    if isinstance(weight, Blocks):
        return _in_blocks(graph, name, states, weight, bias, precision.level)
    made = f"{name}.product" if bias is not None else name
    graph.widest = 32
    graph.add("MatMul", [states, graph.constant(f"{name}.weight", weight.T)], made)
    if bias is not None:
        graph.add("Add", [made, graph.constant(f"{name}.bias", bias)], name)
    return name


def _in_blocks(
    graph: Graph, name: str, states: str, weight: Blocks, bias: Floats | None, level: int
) -> str:
    out, count, size = weight.integers.shape
    bits, offsets, inner = weight.bits, weight.offsets, count * size
    graph.widest = max(graph.widest, bits)
    read, within = stored(weight, bits), None
    if offsets is not None and level == ROUNDED:
        within = with_sums(read, offsets[..., 0], bits)
    if within is not None:
        copies, read = within
        states = _followed_by_sums(graph, states, count, size, copies)
        inner += copies * count
    plain = (read.zeros == 2 ** (bits - 1)).all()
    inputs = [
        states,
        graph.constant(f"{name}.integers", packed(read.integers, bits)),
        graph.constant(f"{name}.scales", read.scales),
        "" if plain else graph.constant(f"{name}.zeros", packed(read.zeros, bits)),
        "",
        "" if bias is None else graph.constant(f"{name}.bias", bias),
    ]
    while not inputs[-1]:
        inputs.pop()
    how = {"K": inner, "N": out, "bits": bits, "block_size": size, "accuracy_level": level}
    apart = offsets if within is None else None
    made = name if apart is None else f"{name}.product"
    graph.add("MatMulNBits", inputs, made, ours=True, **how)
    if apart is not None:
        sums = _sums(graph, states, count, size)
        graph.constant(f"{name}.offsets", apart[..., 0].T)
        graph.add("Gemm", [sums, f"{name}.offsets", made], name)
    return name


def stored(weight: Blocks, bits: int) -> Stored:
    """Blocks, in so many bits, with one zero point for all."""
    zero = 0 if bits == 4 and weight.integers.max() > 7 else 2 ** (bits - 1)
    integers = (weight.integers.astype(np.int16) + zero).astype(np.uint8)
    return Stored(integers, weight.scales[..., 0], np.full(integers.shape[:2], zero, np.uint8))


def packed(integers: NDArray[np.uint8], bits: int) -> NDArray[Any]:
    """Integers as bytes, two of four bits in one."""
    if bits == 8:
        return integers
    if integers.shape[-1] % 2:
        integers = np.concatenate([integers, integers[..., -1:]], -1)
    return integers[..., ::2] | integers[..., 1::2] << 4


def with_sums(blocks: Stored, offsets: Floats, bits: int) -> tuple[int, Stored] | None:
    """Return how many times the sums of blocks stand behind the states, and the weights of all of
    it; None where offsets are more than zero points can take, so that rounding would show.

    The rest that zero points leave of the offsets is rounded to eight bits: to four, and what that
    leaves to four again, where weights have four. Each time the weights begin a new block.
    """
    integers, scales, zeros = blocks.integers, blocks.scales, blocks.zeros.astype(np.int16)
    out, count, size = integers.shape
    half = 2 ** (bits - 1)
    steps = np.divide(offsets, scales, out=np.zeros_like(offsets), where=scales != 0)
    moved = np.clip(zeros - np.rint(steps), 0, 2 * half - 1).astype(np.int16)
    left = offsets + scales * (moved - zeros)
    if (np.abs(left) > np.abs(scales)).any():
        return None
    own = -(-count // size)  # blocks of weights for all sums
    rounds = 8 // bits
    copies = -(-((rounds - 1) * own * size + count) // count)
    behind = -(-copies * count // size)
    k_behind = np.full((out, behind, size), half, np.uint8)
    scales_behind = np.zeros((out, behind), np.float32)
    for i in range(0, rounds * own, own):
        order = np.arange(i * size, i * size + count) % count  # of the sums that stand there
        part = np.pad(left[:, order], ((0, 0), (0, own * size - count))).reshape(out, own, size)
        k, scale = whole(part, 2, bits)
        k_behind[:, i : i + own] = k.astype(np.int16) + half
        scales_behind[:, i : i + own] = scale[..., 0]
        left[:, order] -= (k * scale).reshape(out, -1)[:, :count]
    middle = np.full((out, behind), half, np.int16)
    return copies, Stored(
        np.concatenate([integers, k_behind], 1),
        np.concatenate([scales, scales_behind], 1),
        np.concatenate([moved, middle], 1).astype(np.uint8),
    )


def _followed_by_sums(graph: Graph, states: str, count: int, size: int, copies: int) -> str:
    """States and that many times the sums of their blocks, made once for all products that read
    them."""
    name = f"{states}.with.{copies}.sums.{size}"
    if all(name not in node.output for node in graph.nodes):
        sums = _sums(graph, states, count, size)
        graph.add("Concat", [states, *[sums] * copies], name, axis=-1)
    return name


def _sums(graph: Graph, states: str, count: int, size: int) -> str:
    """The sums of states by blocks, computed once for all products that read them."""
    sums = f"{states}.sums.{size}"
    if all(sums not in node.output for node in graph.nodes):
        shape = graph.constant(f"blocks.{count}.{size}", np.array([-1, count, size]))
        graph.add("Reshape", [states, shape], f"{sums}.blocks")
        last = graph.constant("last axis", np.array([-1]))
        graph.add("ReduceSum", [f"{sums}.blocks", last], sums, keepdims=0)
    return sums


def array(values: Any) -> NDArray[np.float32]:
    """A tensor's numbers in float32."""
    return values.detach().float().numpy()
