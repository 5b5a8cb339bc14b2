"""Experts of a layer in an ONNX graph: the choice of a router, and what the chosen ones make.

ONNX Runtime multiplies the tokens that meet the same expert together, and adds up the parts of a
token in an order that depends on the others. So a token is a row of its own for every expert that
it meets, and its parts are added here. In float32 a lone row of an expert is rounded in another way
than one of several: each is there twice. A token's numbers then do not depend on its company.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from foretoken.models.blocks import Blocks, Floats, found
from foretoken.models.onnx.graph import Graph
from foretoken.models.onnx.products import (
    BLOCK,
    PRECISIONS,
    ROUNDED,
    Precision,
    packed,
    product,
    rounded,
    stored,
)
from foretoken.models.onnx.reading import Experts


def routed(graph: Graph, name: str, states: str, part: Experts, precision: Precision) -> str:
    """The sum of what a token's experts make, by their shares."""
    width = part.down.shape[1]
    axis = graph.constant("second axis", np.array([1]))
    shares, index = _choice(graph, name, states, part)
    whole = width % BLOCK == part.down.shape[2] % BLOCK == 0
    bits = precision.bits if whole else None
    rows = part.met if bits else 2 * part.met
    if not bits:
        index = graph.add("Concat", [index, index], f"{name}.twice", axis=-1)
    made = _made(graph, name, _repeated(graph, name, states, width, rows), index, part, bits)
    shape = graph.constant(f"parts.{rows}.{width}", np.array([-1, rows, width]))
    made = graph.add("Reshape", [made, shape], f"{name}.parts")
    if not bits:
        ends = [graph.constant(f"rows.{n}", np.array([n])) for n in (0, part.met)]
        made = graph.add("Slice", [made, *ends, axis], f"{name}.halves")
    graph.add("Unsqueeze", [shares, axis], f"{name}.row")
    graph.add("MatMul", [f"{name}.row", made], f"{name}.sum")
    return graph.add("Squeeze", [f"{name}.sum", axis], name)


def _repeated(graph: Graph, name: str, states: str, width: int, times: int) -> str:
    """Every token so many times, one behind the other."""
    once = graph.add("Unsqueeze", [states, "second axis"], f"{name}.once")
    shape = graph.constant(f"times.{times}", np.array([1, times, 1]))
    graph.add("Expand", [once, shape], f"{name}.repeated")
    flat = graph.constant(f"flat.{width}", np.array([-1, width]))
    return graph.add("Reshape", [f"{name}.repeated", flat], f"{name}.rows")


def _choice(graph: Graph, name: str, states: str, part: Experts) -> tuple[str, str]:
    """The shares of a token's experts, and their numbers, `[T, met]`."""
    router, name = part.router, f"{name}.router"
    given = product(graph, name, states, router.weight, router.bias, PRECISIONS["float32"])
    if part.of_all:
        given = graph.add("Softmax", [given], f"{name}.all", axis=-1)
    most = graph.constant(f"met.{part.met}", np.array([part.met]))
    shares = graph.add("TopK", [given, most], f"{name}.best", f"{name}.index", axis=-1)
    if not part.of_all:
        shares = graph.add("Softmax", [shares], f"{name}.shares", axis=-1)
    return shares, f"{name}.index"


def _made(graph: Graph, name: str, rows: str, index: str, part: Experts, bits: int | None) -> str:
    """Every row by its expert."""
    line = graph.add("Reshape", [index, graph.constant("line", np.array([-1]))], f"{name}.line")
    total = graph.constant(f"experts.{len(part.down)}", np.array(len(part.down)))
    values = graph.constant("zero and one", np.array([0, 1], np.float32))
    chosen = graph.add("OneHot", [line, total, values], f"{name}.chosen")
    how: dict[str, Any] = {"k": 1, "normalize_routing_weights": 1, "activation_type": "swiglu"}
    how |= {"swiglu_fusion": 1, "activation_alpha": part.slope, "activation_beta": part.shift}
    how |= {"swiglu_limit": part.limit} if part.limit else {}
    count, width, inner = part.down.shape
    weights = part.gate_up.reshape(count, 2 * inner, width), part.down
    biases = ["", ""]
    if part.biases is not None:
        first, second = part.biases
        biases = [
            graph.constant(f"{name}.gate_up.bias", first.reshape(count, -1)),
            graph.constant(f"{name}.down.bias", second),
        ]
    inputs = [rows, chosen]
    for side, weight, bias in zip(("gate_up", "down"), weights, biases, strict=True):
        inputs += _kept(graph, f"{name}.{side}", weight, bits)
        inputs.append(bias)
    if bits:
        how |= {"expert_weight_bits": bits, "block_size": BLOCK, "accuracy_level": ROUNDED}
        how |= {"weights_prepacked": 0, "quant_type": "int"}
    graph.widest = max(graph.widest, bits or 32)
    kind = "QMoE" if bits else "MoE"
    return graph.add(kind, inputs, f"{name}.made", ours=True, **how)


def _kept(graph: Graph, name: str, weight: Floats, bits: int | None) -> list[str]:
    """The weights of experts `[E, out, in]`, in their own blocks or rounded, one at a time."""
    if bits is None:
        return [graph.constant(name, weight)]
    count, out, inner = weight.shape
    integers: NDArray[np.uint8] = np.empty((count, out, inner * bits // 8), np.uint8)
    scales = np.empty((count, out, inner // BLOCK), np.float32)
    own = found(weight[0]) is not None  # looking through all of them would take long
    for i, expert in enumerate(weight):
        blocks = _fitting(found(expert) if own else None, bits) or rounded(expert, bits)
        integers[i] = packed(stored(blocks, bits).integers, bits).reshape(out, -1)
        scales[i] = blocks.scales[..., 0]
    return [graph.constant(f"{name}.integers", integers), graph.constant(f"{name}.scales", scales)]


def _fitting(blocks: Blocks | None, bits: int) -> Blocks | None:
    """Blocks that can be kept: of one size, without offsets, around zero."""
    if blocks is None or blocks.offsets is not None or blocks.integers.shape[2] != BLOCK:
        return None
    half = 2 ** (bits - 1)
    return blocks if -half <= blocks.integers.min() and blocks.integers.max() < half else None
