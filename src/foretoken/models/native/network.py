"""A network in the form that the kernels run: dataclasses with each layer's weights and settings.
`network_reader` makes them from transformers' modules."""

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
RELATIVE_TOLERANCE = 1e-5  # of the comparison of a module's results with those of its dataclass
RowIndices = NDArray[np.int64]  # rows of a weight; -1 stands for a row of zeros, for padding


def to_float_array(values: Any) -> Floats:
    """Return a tensor as a float32 array."""
    return values.detach().float().numpy()


def make_random_states(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def rotate_pairs(x: Tensor, angles: Tensor, scale: float, interleaved: bool) -> Tensor:
    """Apply rotary position embeddings to states x, in float64. angles: the rotation of each pair;
    scale: a factor of cosines and sines; interleaved: as in `Rope`."""
    at = -1 if interleaved else -2
    a, b = x.unflatten(-1, (-1, 2) if interleaved else (2, -1)).double().unbind(at)
    cosine, sine = scale * angles.cos(), scale * angles.sin()
    return torch.stack([a * cosine - b * sine, b * cosine + a * sine], at).flatten(-2)


def pad_head_rows(heads: int, width: int, start: int = 0) -> RowIndices:
    """Return the indices of a weight's rows for `heads` heads of `width` rows each, from row
    `start` on. Each head is padded to full vectors with -1."""
    rows = start + np.arange(heads * width).reshape(heads, width)
    return np.pad(rows, ((0, 0), (0, -width % LANES)), constant_values=-1).ravel()


def take_rows(x: Any, rows: RowIndices) -> Any:
    """Return these rows of an array, with zeros for indices of -1."""
    made = x[rows]
    made[rows < 0] = 0
    return made


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer: weight `[out, in]` and bias `[out]`."""

    weight: Floats
    bias: Floats | None = None

    def select_outputs(self, rows: RowIndices) -> Linear:
        """Return the layer with these outputs only; an index of -1 gives a zero output."""
        return Linear(
            take_rows(self.weight, rows), None if self.bias is None else take_rows(self.bias, rows)
        )

    def select_inputs(self, columns: RowIndices) -> Linear:
        """Return the layer with these inputs only; an index of -1 gives zero weights."""
        return Linear(np.ascontiguousarray(take_rows(self.weight.T, columns).T), self.bias)

    def scale_by(self, inputs: Any, outputs: Any = 1.0) -> Linear:
        """Return one layer that multiplies its inputs by `inputs`, applies this layer, and
        multiplies the result by `outputs`. A factor is a number, or an array with a number for each
        input or output."""
        outputs = np.asarray(outputs, np.float32)
        weight = self.weight * (outputs.reshape(-1, 1) * np.float32(inputs))
        return Linear(weight, None if self.bias is None else self.bias * outputs)

    def concatenate(self, others: list[Linear]) -> Linear:
        """Return one layer with the outputs of this layer, then those of `others`."""
        every = [self, *others]
        biases = [np.zeros(len(x.weight)) if x.bias is None else x.bias for x in every]
        biased = any(x.bias is not None for x in every)
        weight = np.concatenate([x.weight for x in every])
        return Linear(weight, np.concatenate(biases, dtype=np.float32) if biased else None)


@dataclass(frozen=True, slots=True)
class Norm:
    """A norm: x / rms(x) * weight + bias. If `centred`, the mean of x is subtracted first
    (LayerNorm). A weight `[heads, width]` has a row for each head."""

    weight: Floats
    epsilon: float
    bias: Floats | None = None
    centred: bool = False


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embeddings: position p rotates pair i by p * frequencies[i]."""

    frequencies: tuple[float, ...]
    scale: float  # factor of cosines and sines
    interleaved: bool  # True: the numbers of a pair are neighbours; False: half a head apart
    # (a, n): queries are scaled by 1 + a * log(1 + position // n), as in Llama 4 and Ministral
    growth: tuple[float, int] | None = None


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights and settings of a layer's attention."""

    # linear layers of queries, keys and values; of queries only, for cross-attention and for layers
    # that use another layer's keys and values
    projections: list[Linear]
    out: Linear | None  # None: only keys and values are computed, for a decoder's cross-attention
    heads: int
    key_heads: int
    width: int  # of a head
    scale: float
    window: int = 0  # tokens of a sliding window; 0: no window
    softcap: float = 0.0
    clip: float = 0.0  # queries, keys and values are clamped to +-clip; 0: no clamping
    # norms of queries, keys and values: for each head, or for all heads of a token together
    norms: tuple[Norm | None, ...] = (None, None, None)
    norms_last: bool = False  # whether the norms come after the rotation
    sinks: Floats | None = None
    slopes: Floats | None = None  # slopes of ALiBi
    rope: int | None = None  # index in `Decoder.ropes` of the keys' rotation; None: no rotation
    query_rope: int | None = None  # index in `Decoder.ropes` of the queries' rotation
    attends_to_source: bool = False  # whether this is cross-attention
    kv_source_layer: int | None = None  # index of the layer whose KV it uses; None: its own KV
    bias: int = 0  # number of a table in `Decoder.distance_biases`, from 1; 0: none
    gate: Linear | None = None  # sigmoids of its outputs multiply attention's result, before `out`
    latent: Latent | None = None  # weights of latents, which are cached in place of keys and values
    # in block drafts: whether tokens attend to all tokens of their block, and whether the window is
    # counted from the block's first token
    to_block_end: bool = False
    from_block_start: bool = False


@dataclass(frozen=True, slots=True)
class Latent:
    """Weights of attention by latents (MLA). The outputs of `Attention.projections` are, in this
    order: queries, or latents of queries; a token's latent; a token's rotary key."""

    rank: int  # size of a latent
    keys: list[Linear]  # for each head, `[rank, inputs]`: applied to its query
    values: list[Linear]  # for each head, `[outputs, rank]`: applied to its attention result
    query_rank: int = 0  # size of a latent of queries; 0: there are no such latents
    queries: Linear | None = None  # makes queries from latents of queries


@dataclass(frozen=True, slots=True)
class GatedMLP:
    """An MLP: down(act(gate) * up), or down(act(up)) if `gate` is None."""

    gate: Linear | None
    up: Linear
    down: Linear
    activation: str
    # XIELU: the factors of squares (for x above 0), of exponentials (for x below 0) and of x;
    # CLAMPED: alpha and the limit
    curve: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts. If the shared MLP has a gate, the gate is the last row of `router`."""

    router: Linear
    each: list[GatedMLP]
    routing: Routing
    shared_gate: bool
    added: Floats | None = None  # added to scores to choose experts, but not to compute weights


class Routing(NamedTuple):
    """The rule by which a router chooses experts and computes their weights."""

    chosen: int  # number of experts for a token
    sigmoids: bool  # True: scores are the sigmoids of the logits; False: their softmax
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
    steps: Linear | None = None  # its outputs: logits of decays (dt), then logits of beta
    decay: Floats | None = None  # -exp(A_log): log decay = decay * step
    step_bias: Floats | None = None  # added to the logits of decays
    skip: Floats | None = None  # Mamba2's D: factors of values that are added to outputs
    norm: Floats | None = None  # weight of the norm of outputs; None: outputs are gated only
    groups: int = 1  # groups of outputs, each normed separately
    count: int = 1  # numbers in a group, without padding
    gate_first: bool = False  # whether the gate comes before the norm
    epsilon: float = 0.0
    beta_scale: float = 1.0
    min_step: float = 0.0
    max_step: float = float("inf")


@dataclass(frozen=True, slots=True)
class BlockConvolution:
    """Two convolutions over the tokens of a block, before and after attention or an MLP (DFlash2).
    The filter of a token is `base` plus deltas, which `deltas` computes from the token's state."""

    base: Floats  # [2, taps, width]
    deltas: Linear  # its outputs: [2, taps, width / group]
    group: int  # numbers of a state that share a delta


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """A layer: attention or a recurrence, followed by an MLP, experts or both. Either half may be
    missing."""

    # norms before attention, after attention, before the MLP and after the MLP; None: no such norm
    norms: tuple[Norm | None, ...]
    attention: Attention | RecurrentMixer | None  # None: the layer has no such part
    gated: GatedMLP | None  # None: no MLP, or only experts
    residual: float = 1.0  # multiplies the output of attention and MLP before it is added
    factor: float = 1.0  # multiplies the layer's output
    parallel: bool = False  # whether attention and MLP have the same input
    # whether the norms after attention and MLP come after the residual addition
    norm_after_add: bool = False
    experts: Experts | None = None
    input: LayerInput | None = None
    # a recurrence with the same input as attention; both outputs are added to the residual
    parallel_mixer: RecurrentMixer | None = None
    # of a block draft: around attention, and around the MLP
    convolutions: tuple[BlockConvolution | None, BlockConvolution | None] = (None, None)


@dataclass(frozen=True, slots=True)
class LayerInput:
    """Weights with which a layer uses its slice y of the per-layer inputs (`LayerInputs`): after
    its MLP, the layer adds norm(out(act(gate x) * y)), where act is the MLP's activation."""

    gate: Linear
    out: Linear
    norm: Norm
    at: int  # start of the layer's slice in the per-layer inputs of a token


@dataclass(frozen=True, slots=True)
class LayerInputs:
    """Per-layer inputs (Gemma 4), computed for each token: the token's row of `table` plus a
    projection of its embedding. The projection is normed for each layer separately."""

    width: int  # of one layer's slice
    table: Linear  # `[V, layers * width]`
    product: Linear
    norm: Norm
    table_factor: float
    product_factor: float
    sum_factor: float


@dataclass(slots=True)
class Decoder:
    """A decoder, or an encoder, which has no head."""

    width: int
    layers: list[DecoderLayer]
    positions: Linear | None = None  # learned position embeddings, `[positions, width]`
    embedding_norm: Norm | None = None  # before the first layer
    norm: Norm | None = None  # before the head
    head: Linear | None = None
    logit_cap: float = 0.0  # tanh softcap of logits; 0: none
    scale: float = 1.0  # factor of the logits, before they are capped
    ropes: list[Rope] = field(default_factory=list)
    # if the inputs are pairs; for a stack of MTP layers, the inputs of each layer
    pairs: list[PairInputs] = field(default_factory=list)
    # embeddings of all ids `[V, width]`, and the weight that they are computed from; None if the
    # inputs are pairs
    embeddings: Tensor | None = None
    embedded_weight: Tensor | None = None
    distance_biases: list[Floats] = field(
        default_factory=list
    )  # biases by distance, `[heads, 2n + 1]`
    inputs: LayerInputs | None = None


@dataclass(frozen=True, slots=True)
class PairInputs:
    """Weights for the inputs of a draft model, which are pairs of a token embedding and a hidden
    state, and its last norm."""

    width: int  # of an embedding
    norm: Norm | None  # of embeddings
    last: Norm | None  # before the head, in place of `Decoder.norm`
    before_last: bool = False  # whether the next input is the state before that norm
    # projects the target's hidden states at the taps to the draft model's width (EAGLE-3); None:
    # they have that width already
    join: Linear | None = None
    state_norm: Norm | None = None  # of hidden states, before `product`
    # makes the first layer's input from both (MTP); None: the first layer's attention takes both
    product: Linear | None = None
