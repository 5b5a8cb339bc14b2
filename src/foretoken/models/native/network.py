"""A network in the form that the kernels run: records of each layer's weights and settings, which
`network_reader` fills from transformers' modules."""

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
RELATIVE_TOLERANCE = 1e-5  # within which a module's results must agree with the record made of it
RowIndices = NDArray[np.int64]  # of a weight; -1: a row of zeros, for padding


def to_float_array(values: Any) -> Floats:
    """Return a tensor as a float32 array."""
    return values.detach().float().numpy()


def make_random_states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def rotate_pairs(x: Tensor, angles: Tensor, scale: float, interleaved: bool) -> Tensor:
    """Return states after rotary position embeddings, in float64."""
    at = -1 if interleaved else -2
    a, b = x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).double().unbind(at)
    cosine, sine = scale * angles.cos(), scale * angles.sin()
    return torch.stack([a * cosine - b * sine, b * cosine + a * sine], at).flatten(-2)


def pad_head_rows(heads: int, width: int, start: int = 0) -> RowIndices:
    """Return the weight rows of `heads` heads, each padded to full vectors."""
    rows = start + np.arange(heads * width).reshape(heads, width)
    return np.pad(rows, ((0, 0), (0, -width % LANES)), constant_values=-1).ravel()


def take_rows(x: Any, rows: RowIndices) -> Any:
    """Return these rows of an array, with zeros for padding."""
    made = x[rows]
    made[rows < 0] = 0
    return made


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: weight `[out, in]` and bias `[out]`."""

    weight: Floats
    bias: Floats | None = None

    def select_outputs(self, rows: RowIndices) -> Linear:
        """Return the layer with these outputs, with zeros for padding."""
        return Linear(
            take_rows(self.weight, rows), None if self.bias is None else take_rows(self.bias, rows)
        )

    def select_inputs(self, columns: RowIndices) -> Linear:
        """Return the layer with these inputs, with zeros for padding."""
        return Linear(np.ascontiguousarray(take_rows(self.weight.T, columns).T), self.bias)

    def scale_by(self, inputs: Any, outputs: Any = 1.0) -> Linear:
        """Return the layer whose inputs are scaled by `inputs` and whose outputs are scaled by
        `outputs`, each a number or an array."""
        outputs = np.asarray(outputs, np.float32)
        weight = self.weight * (outputs.reshape(-1, 1) * np.float32(inputs))
        return Linear(weight, None if self.bias is None else self.bias * outputs)

    def concatenate(self, others: list[Linear]) -> Linear:
        """Return one layer with the outputs of this one, then those of others."""
        every = [self, *others]
        biases = [np.zeros(len(x.weight)) if x.bias is None else x.bias for x in every]
        biased = any(x.bias is not None for x in every)
        weight = np.concatenate([x.weight for x in every])
        return Linear(weight, np.concatenate(biases, dtype=np.float32) if biased else None)


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight + bias; if `centred`, of x less its mean (LayerNorm). A weight `[heads,
    width]` has a row for each head."""

    weight: Floats
    epsilon: float
    bias: Floats | None = None
    centred: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings: position p rotates pair i by p * frequencies[i]."""

    frequencies: tuple[float, ...]
    scale: float  # of cosine and sine
    interleaved: bool  # whether the numbers of a pair are neighbours, else half a head apart
    # (a, n): queries are scaled by 1 + a * log(1 + position // n), as Llama 4's and Ministral's
    growth: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights and settings of a layer's attention."""

    # of queries, keys and values; of queries alone for cross-attention or shared keys and values
    projections: list[Linear]
    out: Linear | None  # None: only keys and values are computed, for a decoder's cross-attention
    heads: int
    key_heads: int
    width: int  # of a head
    scale: float
    window: int = 0  # tokens of a sliding window; 0: no window
    softcap: float = 0.0
    clip: float = 0.0  # queries, keys and values are clamped to +-clip; 0: not
    # of queries, keys and values: of each head, or of all heads of a token together
    norms: tuple[Norm | None, ...] = (None, None, None)
    norms_last: bool = False  # whether they come after the rotation
    sinks: Floats | None = None
    slopes: Floats | None = None  # of ALiBi
    rope: int | None = None  # index in `Decoder.ropes`, for keys; None: no rotation
    query_rope: int | None = None  # the same for queries
    attends_to_source: bool = False  # cross-attention
    kv_source_layer: int | None = None  # layer whose keys and values it reads; None: its own
    bias: int = 0  # table of `Decoder.distance_biases`, counted from 1; 0: none
    gate: Linear | None = None  # its sigmoids multiply attention's result, before `out`
    latent: Latent | None = None  # cached in place of keys and values


@dataclass(frozen=True, slots=True)
class Latent:
    """Weights of attention by latents (MLA). `Attention.projections` give queries, or latents of
    queries, then a token's latent and its rotary key."""

    rank: int  # size of a latent
    keys: list[Linear]  # of each head, `[rank, inputs]`: applied to its query
    values: list[Linear]  # of each head, `[outputs, rank]`: applied to its attention result
    query_rank: int = 0
    queries: Linear | None = None  # makes queries from latents of queries


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """down(act(gate) * up), or down(act(up)) without a gate."""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: str
    # xIELU's factors of squares above zero, of exponentials below, and of x; or CLAMPED's alpha and
    # limit
    curve: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. If the shared MLP has a gate, it is the router's last row."""

    router: Linear
    each: list[GatedMLP]
    routing: Routing
    shared_gate: bool
    added: Floats | None = None  # to the scores, for the choice of experts but not their weights


class Routing(NamedTuple):
    """The rule by which a router chooses experts and computes their weights."""

    chosen: int  # experts of a token
    sigmoids: bool  # scores are sigmoids of the logits; else their softmax
    normalized: bool  # whether the weights of the chosen experts add up to `scale`
    scale: float
    # experts are chosen from the `chosen_groups` groups whose two best scores have the largest sum
    groups: int = 1
    chosen_groups: int = 1


@dataclass(frozen=True, slots=True)
class RecurrentMixer:
    """A layer's short convolution and the recurrence after it."""

    rule: int  # CONVOLUTION (no recurrence), DELTA or SCAN
    projections: list[Linear]
    out: Linear
    heads: int
    width: int  # of a head's values
    filters: Floats  # of the convolution, `[taps, channels]`
    filter_bias: Floats | None = None
    key_heads: int = 1
    key_width: int = 0
    steps: Linear | None = None  # logits of decays (dt), then of beta
    decay: Floats | None = None
    step_bias: Floats | None = None
    skip: Floats | None = None
    norm: Floats | None = None  # of results; None: they are only gated
    groups: int = 1  # each is normed by itself
    count: int = 1  # numbers of a group, without the padding
    gate_first: bool = False  # whether the gate comes before the norm
    epsilon: float = 0.0
    beta_scale: float = 1.0
    min_step: float = 0.0
    max_step: float = float("inf")


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer: attention or a recurrence, then an MLP, experts or both."""

    # before attention, after it, before the MLP, after it; None: no such norm
    norms: tuple[Norm | None, ...]
    attention: Attention | RecurrentMixer | None  # None: the layer is an MLP alone
    gated: GatedMLP | None  # None: no MLP, or only experts
    residual: float = 1.0  # multiplies the output of attention and MLP before it is added
    factor: float = 1.0  # multiplies the layer's output
    parallel: bool = False  # whether attention and MLP have the same input
    norm_after_add: bool = False  # whether norms after a part come after the residual addition
    experts: Experts | None = None
    input: LayerInput | None = None
    parallel_mixer: RecurrentMixer | None = None  # has attention's input; both outputs are added


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Weights of norm(out(act(gate x) * y)), which a layer adds after its MLP: act is the MLP's
    activation, y the layer's slice of `LayerInputs`."""

    gate: Linear
    out: Linear
    norm: Norm
    at: int  # start of the slice


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer inputs of tokens (Gemma 4): the sum of a row of a table and of a projection of the
    token's embedding, which is normed layer by layer."""

    width: int  # numbers of one layer
    table: Linear  # `[V, layers * width]`
    product: Linear
    norm: Norm
    table_factor: float
    product_factor: float
    sum_factor: float


@dataclass(slots=True)
class Decoder:
    """A decoder; or an encoder, which has no head."""

    width: int
    layers: list[DecoderLayer]
    positions: Linear | None = None  # learned ones, `[positions, width]`
    embedding_norm: Norm | None = None  # before the first layer
    norm: Norm | None = None  # before the head
    head: Linear | None = None
    logit_cap: float = 0.0  # tanh softcap of logits; 0: none
    scale: float = 1.0  # of logits, before they are capped
    ropes: list[Rope] = field(default_factory=list)
    pairs: PairInputs | None = None
    # embeddings of all ids `[V, width]`, and the weight they come from; None for a draft of pairs
    embeddings: Tensor | None = None
    embedded_weight: Tensor | None = None
    distance_biases: list[Floats] = field(
        default_factory=list
    )  # biases by distance, `[heads, 2n + 1]`
    inputs: LayerInputs | None = None


@dataclass(frozen=True, slots=True)
class PairInputs:
    """The inputs of a draft of pairs (EAGLE-3): token embeddings, normed, next to hidden states."""

    width: int  # of an embedding
    norm: Norm  # of embeddings
    join: Linear  # projects the target's tapped states to the draft's width
    before_last: bool  # whether the draft's own states, fed back, are those before its last norm
