"""A transformers decoder read from its modules: what each layer multiplies, normalises and attends
to, for families that are built like Llama: with norms before their parts, behind them, or both,
with parts side by side, and with experts.

Modules are tried where their names do not tell. Every parameter must be read: one that is not
belongs to something that is not understood here. The self-check decides if the reading is right.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.blocks import Floats
from foretoken.models.stock.pairs import EagleLayer, NormedHead, PairsNetwork
from foretoken.models.stock.taps import layers_of

ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu": "none", "gelu_new": "tanh", "relu": "relu"}
ACTIVATIONS |= {"gelu_pytorch_tanh": "tanh", "gelu_fast": "tanh"}
FIRST, SECOND = "input_layernorm", "post_attention_layernorm"
THIRD, FOURTH = "pre_feedforward_layernorm", "post_feedforward_layernorm"
LAST = ("norm", "final_layernorm", "final_layer_norm")
PLAIN = ("fc1", "fc2"), ("c_fc", "c_proj"), ("dense_h_to_4h", "dense_4h_to_h")  # no gate
HEADS = 16  # a multiple of which a head has
SAME = 1e-5  # relative: a norm does what was read


@dataclass(frozen=True, slots=True)
class Linear:
    """A weight `[out, in]` and what is added, `[out]`."""

    weight: Floats
    bias: Floats | None = None


@dataclass(frozen=True, slots=True)
class Norm:
    """x / rms(x) * weight + bias, of x less its mean where that is centred."""

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


@dataclass(frozen=True, slots=True)
class Attention:
    """The weights and settings with which a layer attends."""

    reads: list[Linear]  # queries, keys and values
    out: Linear
    heads: int
    key_heads: int
    width: int  # of a head
    scale: float
    window: int  # tokens that are seen; 0: all
    softcap: float
    norms: tuple[Norm, Norm] | None  # of queries and of keys: of each, or of a token's together
    sinks: Floats | None
    rope: int | None  # number of its rotary positions; None: it has none


@dataclass(frozen=True, slots=True)
class Gated:
    """down(act(gate) * up), or down(act(gate)) without an up."""

    gate: Linear
    up: Linear | None
    down: Linear
    activation: str


@dataclass(frozen=True, slots=True)
class Experts:
    """Several gated parts, of which a token meets some: the sum of their down(act(gate) * (up +
    shift)) by the shares that a router gives them, act(x) = x * sigmoid(slope * x)."""

    router: Linear
    met: int  # experts of a token
    of_all: bool  # shares are those of a softmax over all experts, else over the ones that are met
    gate_up: Floats  # [E, I, 2, H]: those of an inner number side by side
    down: Floats  # [E, H, I]
    biases: tuple[Floats, Floats] | None  # [E, I, 2], [E, H]
    slope: float
    shift: float
    limit: float  # of gate (from above) and up (from both sides); 0: none
    shared: Gated | None  # which every token meets
    opening: Linear | None  # how much of the shared part: the sigmoid of this


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """The norms are absent (None) where a part reads, or gives, states as they are."""

    before_attention: Norm | None
    attention: Attention
    behind_attention: Norm | None
    before_gated: Norm | None
    gated: Gated | Experts
    behind_gated: Norm | None
    residual: float  # what a part gives is multiplied by this
    parallel: bool = False  # whether both parts read what the layer reads, or else its first norm


@dataclass(frozen=True, slots=True)
class PairReads:
    """The beginning of a decoder that reads embeddings with states behind them
    (`models.stock.pairs`), whose first layer attends to both."""

    width: int  # of embeddings
    embedded: Norm
    state: Norm
    normed: bool  # whether what the layers make is added to the state behind its norm


@dataclass(slots=True)
class Decoder:
    """All of a decoder but its embeddings."""

    width: int
    layers: list[DecoderLayer]
    norm: Norm | None  # of what is shown as hidden
    head: Linear
    head_norm: Norm | None  # of what the output layer reads alone
    pairs: PairReads | None
    cap: float  # of logits; 0: none
    scale: float  # of logits, before they are capped
    ropes: list[Rope] = field(default_factory=list)


class NetworkReader:
    """Reads a network, and notes what it has read."""

    def __init__(self, network: PreTrainedModel) -> None:
        self.network = network
        self.config: Any = network.config.get_text_config(decoder=True)
        self.base: Any = network if isinstance(network, PairsNetwork) else network.get_decoder()
        self.rotary: Any = getattr(self.base, "rotary_emb", getattr(self.base, "rotary", None))
        self.read: set[int] = set()
        self.ropes: list[Rope] = []

    def decoder(self) -> Decoder:
        """Raises RefusedError for a network that is built in another way."""
        network, pairs, head_norm = self.network, None, None
        stock = DynamicCache(config=network.config).layers
        head: Any = network.get_output_embeddings()
        if isinstance(network, PairsNetwork):
            layers: Any = [network.first, *network.more]
            pairs = self._pairs(network.first, network.width)
            if isinstance(head, NormedHead):
                head, head_norm = head.linear, self.norm(head.norm)
            self.read |= {
                id(weight) for part in [network.join] if part for weight in part.parameters()
            }
        else:
            layers = list(layers_of(network))
            self.read.add(id(network.get_input_embeddings().weight))
        self._require(head is not None and len(stock) == len(layers), "its layers or its head")
        ends = [getattr(self.base, name) for name in LAST if hasattr(self.base, name)]
        self._require(bool(ends), "no last norm of a known name")
        last = ends[0]
        windows = [getattr(layer, "sliding_window", None) or 0 for layer in stock]
        made = Decoder(
            self.config.hidden_size,
            [self._layer(layer, window) for layer, window in zip(layers, windows, strict=True)],
            None if last is None else self.norm(last),
            self.linear(head),
            head_norm,
            pairs,
            float(getattr(self.config, "final_logit_softcapping", None) or 0),
            1
            / float(getattr(self.config, "logits_scaling", None) or 1)
            * float(getattr(self.config, "logit_scale", None) or 1),
            self.ropes,
        )
        for name, weight in network.named_parameters():
            self._require(id(weight) in self.read, name)
        return made

    def embeddings(self) -> Tensor:
        """The vectors that the first layer reads for every token, `[V, width]`."""
        table: Any = self.network.get_input_embeddings()
        factor = getattr(self.config, "embedding_multiplier", None) or 1.0
        parts = torch.arange(table.weight.shape[0]).split(2**14)
        return torch.cat([table(ids).float() * factor for ids in parts])

    def _pairs(self, layer: Any, width: int) -> PairReads:
        self._require(isinstance(layer, EagleLayer), f"a {type(layer).__name__}")
        norms = self.norm(layer.input_layernorm), self.norm(layer.hidden_norm)
        return PairReads(width, *norms, layer.before)

    def _layer(self, layer: Any, window: int) -> DecoderLayer:
        norms = {name for name, part in layer.named_children() if "norm" in name}
        if isinstance(layer, EagleLayer):  # its attention reads what `PairReads` says
            after = self.norm(layer.post_attention_layernorm)
            attention, gated = self._attention(layer.self_attn, window), self._gated(layer.mlp)
            return DecoderLayer(None, attention, None, after, gated, None, 1.0)
        first, second, third, fourth = (
            self.norm(getattr(layer, name)) if name in norms else None
            for name in (FIRST, SECOND, THIRD, FOURTH)
        )
        if norms == {FIRST, SECOND}:
            places = first, None, second, None
        elif norms == {FIRST, SECOND, THIRD, FOURTH}:
            places = first, second, third, fourth
        elif norms == {SECOND, FOURTH}:
            places = None, second, None, fourth
        elif norms == {FIRST}:
            places = first, None, None, None
        else:
            raise self._refused(f"norms {', '.join(sorted(norms)) or 'of no known name'}")
        parts = {name for name, _ in layer.named_children()} - norms
        inner = "mlp" if "mlp" in parts else "block_sparse_moe"
        outer = "self_attn" if "self_attn" in parts else "attention"
        self._require(
            {outer, inner}
            == {
                name for name in parts if any(True for _ in layer.get_submodule(name).parameters())
            },
            f"layers of {', '.join(sorted(parts))}",
        )
        part = getattr(layer, inner)
        gated = self._experts(part) if hasattr(part, "experts") else self._gated(part)
        attention = self._attention(getattr(layer, outer), window)
        parallel = norms == {FIRST} or getattr(layer, "use_parallel_residual", False)
        residual = float(getattr(layer, "residual_multiplier", 1.0))
        return DecoderLayer(
            places[0], attention, places[1], places[2], gated, places[3], residual, parallel
        )

    def _attention(self, part: Any, window: int) -> Attention:
        width = int(part.head_dim if hasattr(part, "head_dim") else part.head_size)
        self._require(width % HEADS == 0, f"heads of {width} numbers, not a multiple of {HEADS}")
        out = self.linear(getattr(part, "o_proj", getattr(part, "dense", None)))
        heads = out.weight.shape[1] // width
        if hasattr(part, "qkv_proj"):
            one = self.linear(part.qkv_proj)
            key_heads = (len(one.weight) // width - heads) // 2
            reads = _split(one, [heads * width, key_heads * width, key_heads * width])
        elif hasattr(part, "query_key_value"):  # head by head
            one, key_heads = self.linear(part.query_key_value), heads
            self._require(len(one.weight) == 3 * heads * width, "queries that share keys")
            turned = np.arange(3 * heads * width).reshape(heads, 3, width).swapaxes(0, 1).ravel()
            bias = None if one.bias is None else one.bias[turned]
            reads = _split(Linear(one.weight[turned], bias), [heads * width] * 3)
        else:
            names = ("q_proj", "k_proj", "v_proj")
            reads = [self.linear(getattr(part, name, None)) for name in names]
            key_heads = len(reads[1].weight) // width
        norms = None
        if getattr(part, "q_norm", None) is not None:
            norms = self.norm(part.q_norm), self.norm(part.k_norm)
        rope = None
        if getattr(part, "use_rope", True):
            rope, turned = self._rope(part, width)
            if turned < width // 2 and not self.ropes[rope].interleaved:
                self._require(norms is None, "norms of heads that are turned in part")
                reads[:2] = (_apart(linear, width, turned) for linear in reads[:2])
        sinks = getattr(part, "sinks", None)
        if sinks is not None:
            self.read.add(id(sinks))
        return Attention(
            reads,
            out,
            heads,
            key_heads,
            width,
            float(part.scaling),
            window,
            float(getattr(part, "attn_logit_softcapping", None) or 0),
            norms,
            None if sinks is None else array(sinks),
            rope,
        )

    def _gated(self, part: Any) -> Gated:
        plain = next((names for names in PLAIN if hasattr(part, names[0])), None)
        if plain:
            gate, down = (self.linear(getattr(part, name, None)) for name in plain)
            return Gated(gate, None, down, self._activation())
        if hasattr(part, "gate_up_proj"):
            both = self.linear(part.gate_up_proj)
            gate, up = _split(both, [len(both.weight) // 2] * 2)
        else:
            gate = self.linear(getattr(part, "gate_proj", None))
            up = self.linear(getattr(part, "up_proj", None))
        down = self.linear(getattr(part, "down_proj", None))
        return Gated(gate, up, down, self._activation())

    def _activation(self) -> str:
        names = ("hidden_activation", "hidden_act")
        said = next((v for name in names if (v := getattr(self.config, name, None))), None)
        self._require(said in ACTIVATIONS, f"activation {said}")
        return ACTIVATIONS[str(said)]

    def _experts(self, part: Any) -> Experts:
        experts = part.experts
        router, met, of_all = self._router(getattr(part, "gate", getattr(part, "router", None)))
        weights, biases = ("gate_up_proj", "down_proj"), ("gate_up_proj_bias", "down_proj_bias")
        named, biased = dict(experts.named_parameters()), getattr(experts, "has_bias", False)
        self._require(set(named) == {*weights, *(biases if biased else ())}, "experts of this kind")
        self.read |= {id(weight) for weight in named.values()}
        both, down = (array(named[name]) for name in weights)
        if experts.is_transposed:
            both, down = both.swapaxes(1, 2), down.swapaxes(1, 2)
        added = None
        if biased:
            first, second = (array(named[name]) for name in biases)
            added = _side_by_side(first, experts.is_concatenated), second
        clamped = hasattr(experts, "alpha")  # as in gpt-oss
        act = (float(experts.alpha), 1.0, float(experts.limit)) if clamped else (1.0, 0.0, 0.0)
        self._require_gates(experts, down.shape[2], *act)
        both = _side_by_side(both, experts.is_concatenated)
        shared, opening = (getattr(part, n, None) for n in ("shared_expert", "shared_expert_gate"))
        shared, opening = shared and self._gated(shared), opening and self.linear(opening)
        return Experts(router, met, of_all, both, down, added, *act, shared, opening)

    def _require_gates(
        self, experts: Any, inner: int, slope: float, shift: float, limit: float
    ) -> None:
        """RefusedError where experts' gates do not act as was read, tried on numbers large and
        small."""
        states = 8 * torch.randn(2, 2 * inner, generator=torch.Generator().manual_seed(0))
        pairs = torch.from_numpy(_side_by_side(states.numpy(), experts.is_concatenated))
        gate, up = pairs.unbind(-1)
        if limit:
            gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        with torch.no_grad():
            made = experts._apply_gate(states)
        read = gate * torch.sigmoid(slope * gate) * (up + shift)
        same = torch.allclose(made, read, rtol=SAME, atol=SAME)
        self._require(same, f"gates of {type(experts).__name__}")

    def _router(self, part: Any) -> tuple[Linear, int, bool]:
        """The product of a router, how many experts it takes, and whether the shares are those of a
        softmax over all, tried."""
        what = f"experts chosen by a {type(part).__name__}"
        own = dict(part.named_parameters()) if isinstance(part, nn.Module) else {}
        self._require("weight" in own and {"weight", "bias"} >= set(own), what)
        weight, bias = own["weight"], own.get("bias")
        states = torch.randn(8, weight.shape[1], generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            _, shares, index = part(states)
            logits = functional.linear(states, weight, bias)
            best = logits.softmax(-1).topk(index.shape[-1])
            among = logits.gather(1, best.indices).softmax(-1)
        of_all, of_met = (
            torch.allclose(read, shares, rtol=SAME, atol=SAME) for read in (best.values, among)
        )
        self._require(torch.equal(best.indices, index) and (of_all or of_met), what)
        self.read |= {id(each) for each in own.values()}
        linear = Linear(array(weight), None if bias is None else array(bias))
        return linear, index.shape[-1], not of_met

    def linear(self, part: Any) -> Linear:
        if type(part) is not nn.Linear:
            raise self._refused(f"a {type(part).__name__} in place of a linear layer")
        self.read |= {id(weight) for weight in part.parameters()}
        return Linear(array(part.weight), None if part.bias is None else array(part.bias))

    def norm(self, part: Any) -> Norm:
        """The factors of a norm, tried: some add one to their weight."""
        epsilon = getattr(part, "variance_epsilon", None) or getattr(part, "eps", None)
        if not epsilon:
            raise self._refused(f"a {type(part).__name__}")
        width = next(part.parameters()).shape[-1]
        states = torch.randn(2, width, generator=torch.Generator().manual_seed(0)) + 0.5
        with torch.no_grad():
            made = part(states)
        plain = states * torch.rsqrt(states.square().mean(-1, keepdim=True) + epsilon)
        self.read |= {id(weight) for weight in part.parameters()}
        weight = made[0] / plain[0]
        if torch.allclose(made[1], plain[1] * weight, rtol=SAME, atol=SAME):
            return Norm(array(weight), float(epsilon))
        own, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        self._require(own is not None and own.shape == (width,), f"a {type(part).__name__}")
        with torch.no_grad():
            centred = functional.layer_norm(states, (width,), own, bias, epsilon)
        same = torch.allclose(made, centred, rtol=SAME, atol=SAME)
        self._require(same, f"a {type(part).__name__}")
        return Norm(array(own), float(epsilon), None if bias is None else array(bias), True)

    def _rope(self, part: Any, width: int) -> tuple[int, int]:
        """The number of a layer's rotary positions, tried on a few, and how many pairs of a head
        they turn; the others are turned by nothing."""
        turn = self.rotary
        self._require(turn is not None, "positions that are not rotary")
        kinds: list[str] = getattr(self.config, "layer_types", None) or []
        by_kind = "layer_type" in inspect.signature(turn.forward).parameters
        more = {"layer_type": kinds[part.layer_idx]} if by_kind else {}
        places = torch.tensor([[0, 1, 2, 3, 50, 100]])
        cosine, sine = (x[0].double() for x in turn(torch.zeros(1), places, **more))
        prefix = f"{kinds[part.layer_idx]}_" if by_kind else ""
        frequencies: Tensor = getattr(turn, f"{prefix}inv_freq")
        if len(frequencies) == cosine.shape[1]:  # one for both numbers of a pair
            cosine, sine = (torch.cat([x, x], -1) for x in (cosine, sine))
        half = cosine.shape[1] // 2
        interleaved = not torch.equal(cosine[:, :half], cosine[:, half:])
        cosine, sine = (x[:, ::2] if interleaved else x[:, :half] for x in (cosine, sine))
        scale = float(cosine[0, 0])
        angles = places[0, :, None].double() * frequencies.double()
        pair = torch.stack([angles.cos(), angles.sin()]) * scale
        same = pair.shape[1:] == cosine.shape and torch.allclose(
            pair, torch.stack([cosine, sine]), atol=SAME, rtol=0
        )
        self._require(same, "rotary positions of another kind")
        turned = len(frequencies)
        still = [0.0] * (width // 2 - turned)
        self._require(not still or scale == 1, "rotary positions of a part, scaled")
        rope = Rope((*frequencies.double().tolist(), *still), scale, interleaved)
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope), turned

    def _require(self, known: bool, what: str) -> None:
        if not known:
            raise self._refused(what)

    def _refused(self, what: str) -> RefusedError:
        return RefusedError(
            f"{type(self.network).__name__} is not built as the native decoder expects ({what})"
        )


def array(values: Any) -> Floats:
    """Return a tensor's numbers in float32."""
    return values.detach().float().numpy()


def _side_by_side(both: Floats, behind: bool) -> Floats:
    """Gates and ups `[E, 2 I, ...]`, the ones behind the others or in turns: `[E, I, 2, ...]`."""
    count, inner, *rest = both.shape
    if behind:
        return both.reshape(count, 2, inner // 2, *rest).swapaxes(1, 2)
    return both.reshape(count, inner // 2, 2, *rest)


def _apart(linear: Linear, width: int, turned: int) -> Linear:
    """Queries or keys of heads whose first numbers are turned, in an order in which the two of a
    pair stand half a head apart: attention is the same in any."""
    first, second, rest = np.split(np.arange(width), [turned, 2 * turned])
    one, other = np.split(rest, 2)
    order = np.concatenate([first, one, second, other])
    rows = np.arange(len(linear.weight)).reshape(-1, width)[:, order].ravel()
    return Linear(linear.weight[rows], None if linear.bias is None else linear.bias[rows])


def _split(linear: Linear, sizes: list[int]) -> list[Linear]:
    weights = torch.from_numpy(linear.weight).split(sizes)
    biases: Any = [None] * len(sizes)
    if linear.bias is not None:
        biases = [x.numpy() for x in torch.from_numpy(linear.bias).split(sizes)]
    return [Linear(w.numpy(), b) for w, b in zip(weights, biases, strict=True)]
