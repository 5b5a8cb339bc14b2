"""A network as the kernels run it: records of what each layer multiplies, normalises and attends
to, and the weights. Read of transformers' modules by `with_target`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional

from foretoken.models.native.packing import LANES
from foretoken.models.quantized_blocks import Floats

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
    "relu_squared": lambda x: functional.relu(x).square(),
}
XIELU, CLAMPED = "xielu", "clamped"
KERNEL_ACTIVATIONS = *ACTIVATIONS, XIELU, CLAMPED  # in the kernels' order
CONVOLUTION, DELTA, SCAN = 1, 2, 3  # rules of recurrences, as in network.h
RELATIVE_TOLERANCE = 1e-5  # relative: a part does what was read of it
RowIndices = NDArray[np.int64]  # -1: a row of zeros


def to_float_array(values: Any) -> Floats:
    """Return a tensor's numbers in float32."""
    return values.detach().float().numpy()


def make_random_states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def rotate_pairs(x: Tensor, angles: Tensor, scale: float, interleaved: bool) -> Tensor:
    """Return states that rotary positions have turned, in float64."""
    at = -1 if interleaved else -2
    a, b = x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).double().unbind(at)
    cosine, sine = scale * angles.cos(), scale * angles.sin()
    return torch.stack([a * cosine - b * sine, b * cosine + a * sine], at).flatten(-2)


def pad_head_rows(heads: int, width: int, start: int = 0) -> RowIndices:
    """Return the rows of heads, each padded to full vectors."""
    rows = start + np.arange(heads * width).reshape(heads, width)
    return np.pad(rows, ((0, 0), (0, -width % LANES)), constant_values=-1).ravel()


def take_rows(x: Any, rows: RowIndices) -> Any:
    """Return these rows of an array, zeros for those of the padding."""
    made = x[rows]
    made[rows < 0] = 0
    return made


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight `[out, in]` and what is added, `[out]`."""

    weight: Floats
    bias: Floats | None = None

    def select_outputs(self, rows: RowIndices) -> Linear:
        """Return these outputs, zeros for those of the padding."""
        return Linear(
            take_rows(self.weight, rows), None if self.bias is None else take_rows(self.bias, rows)
        )

    def select_inputs(self, columns: RowIndices) -> Linear:
        """Return the weight of these inputs, zeros for those of the padding."""
        return Linear(np.ascontiguousarray(take_rows(self.weight.T, columns).T), self.bias)

    def scale_by(self, inputs: Any, outputs: Any = 1.0) -> Linear:
        """Return the product of states times `inputs`, times `outputs`: numbers, or one for each
        output."""
        outputs = np.asarray(outputs, np.float32)
        weight = self.weight * (outputs.reshape(-1, 1) * np.float32(inputs))
        return Linear(weight, None if self.bias is None else self.bias * outputs)

    def concatenate(self, others: list[Linear]) -> Linear:
        """Return the outputs of this one, then those of others."""
        every = [self, *others]
        biases = [np.zeros(len(x.weight)) if x.bias is None else x.bias for x in every]
        biased = any(x.bias is not None for x in every)
        weight = np.concatenate([x.weight for x in every])
        return Linear(weight, np.concatenate(biases, dtype=np.float32) if biased else None)


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight + bias, of x less its mean where that is centred. A weight `[heads,
    width]` has a row for each head."""

    weight: Floats
    epsilon: float
    bias: Floats | None = None
    centred: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions: position p turns pair i by p * frequencies[i]."""

    frequencies: tuple[float, ...]
    scale: float  # of cosine and sine
    interleaved: bool  # whether the numbers of a pair are neighbours
    # (a, n): it all grows by 1 + a * log(1 + position // n)
    growth: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights and settings with which a layer attends."""

    projections: list[
        Linear
    ]  # queries, keys and values; queries alone, or keys and values, see below
    out: Linear | None  # None: only keys and values are made, for a decoder to read
    heads: int
    key_heads: int
    width: int  # of a head
    scale: float
    window: int = 0  # tokens that are seen; 0: all
    softcap: float = 0.0
    clip: float = 0.0  # of queries, keys and values; 0: none
    # of queries, keys and values: of each, or a token's together
    norms: tuple[Norm | None, ...] = (None, None, None)
    norms_last: bool = False  # whether they read what is turned
    sinks: Floats | None = None
    slopes: Floats | None = None  # of ALiBi
    rope: int | None = None  # number of its rotary positions; None: it has none
    query_rope: int | None = None  # the same of queries
    attends_to_source: bool = False  # whether its keys and values are those of the row's source
    kv_source_layer: int | None = None  # layer whose keys and values it reads; None: its own
    bias: int = 0  # number of the table of biases by distance, from 1 on; 0: none
    gate: Linear | None = None  # its sigmoids multiply what attention gives
    latent: Latent | None = None  # cached in place of keys and values


@dataclass(frozen=True, slots=True)
class Latent:
    """Weights that make queries, and the keys and values of heads, of latents. `Attention.reads`
    gives queries, or latents of them, then a token's latent and a key that is turned."""

    rank: int  # of a latent
    keys: list[Linear]  # of each head: of its query, `[rank, inputs]`
    values: list[Linear]  # of each head: of what it attended to, `[outputs, rank]`
    query_rank: int = 0
    queries: Linear | None = None  # of latents of queries


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(act(gate) * up), or down(act(up)) without a gate."""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: str
    curve: tuple[float, ...]  # of xIELU: of squares above zero, of exponentials below, and of x


@dataclass(frozen=True, slots=True)
class Experts:
    """MLPs of which each token has some, by a router's logits. Where one more MLP has a gate, that
    is the router's last row."""

    router: Linear
    each: list[GatedMLP]
    routing: Routing
    shared_gate: bool
    added: Floats | None = None  # to the scores, for the choice alone


class Routing(NamedTuple):
    """A rule that chooses experts by their scores, and weighs them."""

    chosen: int
    sigmoids: bool  # whether scores are sigmoids of the logits, or their softmax
    normalized: bool  # whether the weights of those chosen add up to `scale`
    scale: float
    # of experts, and how many of these, whose two best add up to most, are chosen from
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """A layer's convolution, and the recurrence behind it."""

    rule: int
    projections: list[Linear]
    out: Linear
    heads: int
    width: int  # of a head's values
    filters: Floats  # of the convolution, `[taps, channels]`
    filter_bias: Floats | None = None
    key_heads: int = 1
    key_width: int = 0
    steps: Linear | None = None  # of decays, then of beta
    decay: Floats | None = None
    step_bias: Floats | None = None
    skip: Floats | None = None
    norm: Floats | None = None  # of results
    groups: int = 1  # that are normed by themselves
    count: int = 1  # numbers of a group, without the padding
    gate_first: bool = False
    epsilon: float = 0.0
    beta_scale: float = 1.0
    min_step: float = 0.0
    max_step: float = float("inf")


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The norms are absent (None) where a part reads, or gives, states as they are."""

    norms: tuple[Norm | None, ...]  # before attention, behind it, before the MLP, behind it
    attention: Attention | RecurrentMixer | None  # None: the layer is an MLP alone
    gated: GatedMLP | None  # None: there is no MLP, or all of them are experts
    residual: float = 1.0  # what a part gives is multiplied by this
    factor: float = 1.0  # of all that the layer makes
    parallel: bool = False  # whether both parts read what the layer reads
    norm_after_add: bool = False  # whether norms behind a part read what it was added to
    experts: Experts | None = None
    input: LayerInput | None = None
    parallel_mixer: RecurrentMixer | None = None  # it reads what attention reads, and is added, too


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Weights of what a layer adds behind its MLP, norm(out(act(gate x) * part)) of its part of
    `LayerInputs`, with the MLP's activation."""

    gate: Linear
    out: Linear
    norm: Norm
    at: int  # where its part begins


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Inputs of tokens that all layers read beside states: a row of a table, and a product with the
    embedding, normed layer by layer; their sum."""

    width: int  # of a layer
    table: Linear  # `[V, layers * width]`
    product: Linear
    norm: Norm
    table_factor: float
    product_factor: float
    sum_factor: float


@dataclass(slots=True)
class Decoder:
    """All of a decoder but its embeddings, or of an encoder, which has no head."""

    width: int
    layers: list[DecoderLayer]
    positions: Linear | None = None  # learned ones, `[positions, width]`
    embedding_norm: Norm | None = None  # of what the first layer reads
    norm: Norm | None = None  # of what the head reads
    head: Linear | None = None
    logit_cap: float = 0.0  # of logits; 0: none
    scale: float = 1.0  # of logits, before they are capped
    ropes: list[Rope] = field(default_factory=list)
    pairs: PairInputs | None = None
    # its vectors of all ids, and the weight they are made of; of a decoder of pairs: None
    embeddings: Tensor | None = None
    embedded_weight: Tensor | None = None
    distance_biases: list[Floats] = field(
        default_factory=list
    )  # biases by distance, `[heads, 2n + 1]`
    inputs: LayerInputs | None = None


@dataclass(frozen=True, slots=True)
class PairInputs:
    """The inputs of a decoder of pairs: embeddings, of this width, normed, and states, which a
    product makes of a target's; and whether the states that it feeds back are those before its
    last norm."""

    width: int
    norm: Norm
    join: Linear
    before_last: bool
