"""Makes the kernels' `Decoder` from the modules of a transformers decoder.

A module whose name does not determine its computation is identified by its results on random
inputs. A network with a weight that is not used here computes something unknown, and is refused.
The self-check then compares the result with transformers.
"""

from __future__ import annotations

import inspect
import sys
from contextlib import suppress
from dataclasses import replace
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_layers import MtpLayer
from transformers.pytorch_utils import Conv1D

from foretoken.errors import RefusedError
from foretoken.models.native.experts import read_experts
from foretoken.models.native.latents import read_latents
from foretoken.models.native.network import (
    ACTIVATIONS,
    RELATIVE_TOLERANCE,
    XIELU,
    Attention,
    Decoder,
    DecoderLayer,
    GatedMLP,
    LayerInput,
    LayerInputs,
    Linear,
    Norm,
    PairInputs,
    RecurrentMixer,
    Rope,
    make_random_states,
    rotate_pairs,
    to_float_array,
)
from foretoken.models.native.packing import LANES
from foretoken.models.native.recurrences import (
    MIXER_NAMES,
    read_recurrence,
    scale_attention,
    scale_mixer,
)
from foretoken.models.quantized_blocks import Floats
from foretoken.models.stock.assistant import SLIDING_ATTENTION, Assistant
from foretoken.models.stock.pairs import EagleLayer, NormedHead, PairsNetwork
from foretoken.models.stock.sizes import get_context_limit
from foretoken.models.stock.taps import get_decoder_layers

# Names of a layer's norms: before attention, after attention, before the MLP, after the MLP
INPUT_NORM, ATTENTION_NORM = "input_layernorm", "post_attention_layernorm"
NORM_LAYOUTS: tuple[tuple[str | None, ...], ...] = (
    (INPUT_NORM, None, ATTENTION_NORM, None),
    (INPUT_NORM, ATTENTION_NORM, "pre_feedforward_layernorm", "post_feedforward_layernorm"),
    (INPUT_NORM, "post_self_attn_layernorm", ATTENTION_NORM, "post_mlp_layernorm"),
    (None, ATTENTION_NORM, None, "post_feedforward_layernorm"),
    ("attention_layernorm", None, "feedforward_layernorm", None),
    ("self_attn_layer_norm", None, "final_layer_norm", None),
    ("ln_1", None, "ln_2", None),
    ("norm_1", None, "norm_2", None),
    ("ln_attn", None, "ln_mlp", None),
    (INPUT_NORM, None, "pre_feedforward_layernorm", None),
    (INPUT_NORM, "post_norm1", ATTENTION_NORM, "post_norm2"),
    (INPUT_NORM, None, None, None),
    ("ln_1", None, None, None),
    ("operator_norm", None, "ffn_norm", None),
    ("operator_norm", "post_operator_norm", "ffn_norm", "post_ffn_norm"),
    (INPUT_NORM, None, "pre_ff_layernorm", None),
    (INPUT_NORM, ATTENTION_NORM, "pre_mlp_layernorm", "post_mlp_layernorm"),
)
# Names that different families give to the same kind of module
LAST_NORM_NAMES = (
    "norm",
    "embedding_norm",
    "final_layernorm",
    "final_layer_norm",
    "ln_f",
    "norm_f",
    "layer_norm",
)
LAYER_INPUT_NORM = "post_per_layer_input_norm"
POSITION_TABLE_NAMES = "wpe", "embed_positions"
ATTENTION_NAMES = "self_attn", "self_attention", "attention", "attn"
MLP_NAMES = "mlp", "feed_forward", "ffn", "block_sparse_moe", "shared_mlp"
ROTARY_FUNCTION = "apply_rotary_pos_emb"
ROTARY_MODULE_NAMES = "rotary_emb", "rotary", "pos_emb"
QKV_NORM_NAMES = (
    ("q_norm", "q_layernorm", "query_layernorm"),
    ("k_norm", "k_layernorm", "key_layernorm"),
    ("v_norm",),
)
FUSED_QKV_NAMES = "qkv_proj", "query_key_value", "c_attn", "Wqkv"
OUTPUT_NAMES = "o_proj", "out_proj", "dense", "c_proj"
GATED_MLP_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2"), ("wi_0", "wi_1", "wo")
PLAIN_MLP_NAMES = (
    ("fc1", "fc2"),
    ("wi", "wo"),
    ("c_fc", "c_proj"),
    ("dense_h_to_4h", "dense_4h_to_h"),
)
PLAIN_MLP_NAMES += ("fc_in", "fc_out"), ("up_proj", "down_proj")
FUSED_MLP_NAMES = ("gate_up_proj", "down_proj"), ("input_linear", "output_linear")
EXPERT_LATENT_NAMES = "fc1_latent_proj", "fc2_latent_proj"  # of Nemotron-H's experts
ATTENTION_GATE_NAMES = "g_proj", "gate_proj"
SCALE_NAMES = "scaling", "softmax_scale", "inv_norm_factor"
ACTIVATION_FIELDS = "act_fn", "act", "activation", "activation_fn", "gelu_impl"
NUM_CODEGEN_PARTS = 4  # CodeGen's fused weight has queries, values and keys in four parts
MAX_HEAD_WIDTH, MAX_QUERY_GROUP = 1024, 128  # the kernels' limits; group: queries of a key head
NUM_ALIBI_TRIAL_POSITIONS = 4096


class NetworkReader:
    """Makes a `Decoder` from a transformers network, and records which of its weights it has
    used."""

    def __init__(self, network: PreTrainedModel | Assistant) -> None:
        self.network: Any = network
        self.config: Any = network.config.get_text_config(decoder=True)
        whole = isinstance(network, PairsNetwork | Assistant)
        self.base: Any = network if whole else network.get_decoder()
        self.positions: Linear | None = None
        self.read_weights: set[int] = set()  # ids of tensors
        self.ropes: list[Rope] = []
        self.layers: list[Any] = []
        self.inputs: LayerInputs | None = None

    def read_decoder(self) -> Decoder:
        """Return the decoder. Raises RefusedError for a network that the kernels do not support."""
        if isinstance(self.network, PairsNetwork):
            made = self._read_pairs(self.network)
        elif isinstance(self.network, Assistant):
            made = self._read_assistant(self.network)
        else:
            made = self._read_token_decoder()
        self._require_all_read()
        return made

    def _require_all_read(self) -> None:
        known = self.read_weights | self._find_outside_weights()
        for name, weight in self.network.state_dict(keep_vars=True).items():  # buffers, too
            self.require(id(weight) in known, f"{name}, a weight of unknown use")

    def _find_outside_weights(self) -> set[int]:
        """Return the ids of the weights outside the decoder if the network takes media; else an
        empty set."""
        if self.config is self.network.config:
            return set()
        every = self.network.state_dict(keep_vars=True).values()
        own = self.base.state_dict(keep_vars=True).values()
        return {*map(id, every)} - {*map(id, own)}

    def _read_pairs(self, network: PairsNetwork) -> Decoder:
        """Return the decoder of an EAGLE-3 draft, or of layers for multi-token prediction (MTP)."""
        width, hidden = network.width, self.config.hidden_size
        aligned = width % LANES == hidden % LANES == 0
        self.require(aligned, f"widths {width} and {hidden}, not multiples of {LANES}")
        if isinstance(network.first, MtpLayer):
            return self._read_mtp(network)
        first, head, join = network.first, network.head, network.join
        own = isinstance(head, NormedHead)
        norm: Any = head.norm if own else network.norm
        known = isinstance(first, EagleLayer) and norm is not None and join is not None
        self.require(known, "pairs of another kind than EAGLE-3's or MTP's")
        assert isinstance(first, EagleLayer)
        assert join is not None
        self.require(not len(join.norms), "hidden states normed before their projection")
        full = {*network.layer_types} == {"full_attention"}
        self.require(full, "a draft with sliding windows")
        state = self.read_norm(first.hidden_norm)
        before = (
            (None if first.norm_before_residual else state),
            None,
            self.read_norm(first.post_attention_layernorm),
        )
        attention, gated = self._read_attention(first.self_attn, 0), self.read_mlp(first.mlp)
        layer = DecoderLayer((*before, None), attention, gated, 1.0, 1.0, parallel=False)
        return Decoder(
            hidden,
            [layer, *(self._read_layer(each, 0) for each in network.more)],
            embedding_norm=state if first.norm_before_residual else None,
            head=self.read_linear(head.linear if own else head),
            ropes=self.ropes,
            pairs=[
                PairInputs(
                    width,
                    self.read_norm(first.input_layernorm),
                    self.read_norm(norm),
                    own,
                    self.read_linear(join.fc),
                )
            ],
        )

    def _read_mtp(self, network: PairsNetwork) -> Decoder:
        """Return the decoder of one MTP layer, or of a stack of them, each with inputs of its
        own."""
        layers: list[Any] = [network.first, *network.more]
        swapped = getattr(self.config, "mtp_hidden_states_first", False)
        self.require(not swapped, "pairs that begin with the hidden state")
        self.layers = [each.mtp_block for each in layers]
        kinds = network.layer_types
        known = {*kinds} <= {"full_attention", SLIDING_ATTENTION}
        self.require(known, f"layers of kind {', '.join({*kinds})}")
        windows = [kind == SLIDING_ATTENTION and self.config.sliding_window for kind in kinds]
        return Decoder(
            self.config.hidden_size,
            [self._read_layer(x, int(n)) for x, n in zip(self.layers, windows, strict=True)],
            head=network.head and self.read_linear(network.head),
            ropes=self.ropes,
            pairs=[
                PairInputs(
                    network.width,
                    self.read_norm(each.enorm),
                    each.post_norm and self.read_norm(each.post_norm),
                    state_norm=self.read_norm(each.hnorm),
                    product=self.read_linear(each.eh_proj),
                )
                for each in layers
            ],
        )

    def _read_assistant(self, network: Assistant) -> Decoder:
        """Return the decoder of an assistant of Gemma 4, whose layers use the target's keys and
        values. An output layer with centroids stays on torch."""
        hidden, inputs = self.config.hidden_size, network.pre_projection.in_features
        aligned = hidden % LANES == inputs % LANES == 0 and inputs > hidden
        self.require(aligned, f"widths {hidden} and {inputs}, not multiples of {LANES}")
        self.layers = list(cast(Any, network.model["layers"]))
        window = network.sliding_window
        windows = [window * (kind == SLIDING_ATTENTION) for kind in network.layer_types]
        head = None
        if network.masked_embedding is None:
            head = self.read_linear(network.lm_head)
        else:
            parts = network.lm_head, network.masked_embedding
            self.read_weights |= {
                id(x) for part in parts for x in part.state_dict(keep_vars=True).values()
            }
        # the kernels' inputs are an embedding and a state of the network's width; as neither is
        # normed, they may as well divide the assistant's inputs elsewhere
        pairs = PairInputs(
            inputs - hidden,
            None,
            self.read_norm(network.model["norm"]),
            join=self.read_linear(network.post_projection),
            product=self.read_linear(network.pre_projection),
        )
        return Decoder(
            hidden,
            [self._read_layer(x, n) for x, n in zip(self.layers, windows, strict=True)],
            head=head,
            ropes=self.ropes,
            pairs=[pairs],
        )

    def _read_token_decoder(self) -> Decoder:
        network, config = self.network, self.config
        stock = DynamicCache(config=network.config).layers
        head: Any = network.get_output_embeddings()
        self.layers = layers = list(get_decoder_layers(network))
        table: Any = network.get_input_embeddings()
        vectors = self.compute_vectors(table, getattr(config, "embedding_multiplier", None) or 1.0)
        self.require(head is not None and len(stock) <= len(layers), "unknown layers or head")
        last = self.find_part(self.base, LAST_NORM_NAMES, "last norm")
        embedded = getattr(self.base, "word_embeddings_layernorm", None)
        self.positions = self._read_positions(get_context_limit(self.config))
        windows = [getattr(layer, "sliding_window", None) or 0 for layer in stock]
        # layers that share another layer's keys and values may have no entry in the cache
        windows += [0] * (len(layers) - len(windows))
        for i in range(len(layers)):
            if (kv_source := self._find_kv_source_layer(i)) is not None:
                windows[i] = windows[kv_source]
        self.inputs = self._read_layer_inputs()
        return Decoder(
            config.hidden_size,
            [
                self._read_layer(layer, window)
                for layer, window in zip(layers, windows, strict=True)
            ],
            self.positions,
            embedded and self.read_norm(embedded),
            last and self.read_norm(last),
            self.read_linear(head),
            float(getattr(config, "final_logit_softcapping", None) or 0),
            self._get_logit_scale(),
            self.ropes,
            embeddings=vectors,
            embedded_weight=table.weight,
            inputs=self.inputs,
        )

    def _find_kv_source_layer(self, number: int) -> int | None:
        """Return the index of the earlier layer whose keys and values layer `number` uses (Gemma
        4), or, in an assistant, of the target's layer; None if layer `number` computes its own."""
        part: Any = getattr(self.layers[number], "self_attn", None)
        if isinstance(self.network, Assistant):
            return self.network.kv_source_layers[part.layer_type]
        if not getattr(part, "is_kv_shared_layer", False):
            return None
        for i in reversed(range(number)):
            other = self.layers[i].self_attn
            if other.layer_type == part.layer_type and other.store_full_length_kv:
                return i
        raise self.make_refusal("no layer to share keys and values with")

    def _get_logit_scale(self) -> float:
        """Return the factor by which the family multiplies logits."""
        config = self.config
        factor = float(getattr(config, "logit_scale", None) or 1)
        factor *= float(getattr(self.base, "lm_head_multiplier", 1.0))
        return factor / float(getattr(config, "logits_scaling", None) or 1)

    def compute_vectors(self, table: Any, factor: float) -> Tensor:
        """Return the embeddings of all ids, `[V, width]`, computed by the module `table` and
        multiplied by `factor`."""
        self.read_weights.add(id(table.weight))
        parts = torch.arange(table.weight.shape[0]).split(2**14)
        return torch.cat([table(ids).float() * factor for ids in parts])

    def _read_positions(self, limit: int | None) -> Linear | None:
        """Return the learned embeddings of positions 0 to `limit - 1`; None if there are none."""
        part = next(
            (p for name in POSITION_TABLE_NAMES if (p := getattr(self.base, name, None))), None
        )
        if part is None:
            return None
        table = getattr(part, "weight", getattr(part, "weights", None))
        offset = getattr(part, "offset", 0)
        if hasattr(part, "create_position_ids_from_input_ids"):
            offset = part.padding_idx + 1
        known = isinstance(table, Tensor) and table.ndim == 2 and limit is not None
        self.require(known, f"positions from a {type(part).__name__}")
        assert table is not None
        assert limit is not None
        self.require(table.shape[0] >= limit + offset, "fewer positions than its context")
        self.read_weights.add(id(table))
        return Linear(to_float_array(table[offset : limit + offset]))

    def _read_layer(self, layer: Any, window: int) -> DecoderLayer:
        if hasattr(layer, "mixer"):
            return self._read_one_part_layer(layer, window)
        names = {
            name for name, _ in layer.named_children() if "norm" in name or name.startswith("ln_")
        } - {LAYER_INPUT_NORM}
        layout = next((p for p in NORM_LAYOUTS if {*p} - {None} == names), None)
        if layout is None:
            raise self.make_refusal(
                f"unknown layout of norms: {', '.join(sorted(names)) or 'none with a known name'}"
            )
        parts: list[Any] = [name and getattr(layer, name) for name in layout]
        norms = [None if isinstance(p, nn.Identity) else p and self.read_norm(p) for p in parts]
        attention, parallel_mixer = self._read_mixers(layer, window)
        mlp = next((p for name in MLP_NAMES if (p := getattr(layer, name, None))), layer)
        scalar = getattr(layer, "layer_scalar", None)
        self.read_weights.add(id(scalar))
        single_norm = layout[1:] == (None, None, None) or layout[0] == "ln_attn"
        experts, gated = None, None
        if hasattr(mlp, "experts"):
            experts, gated = read_experts(self, mlp, getattr(layer, "shared_mlp", None))
        layer_input = None
        if self.inputs is not None:
            layer_input = self._read_layer_input(layer, self.inputs.width)
        return DecoderLayer(
            tuple(norms),
            attention,
            self.read_mlp(mlp) if experts is None else gated,
            float(getattr(layer, "residual_multiplier", getattr(layer, "residual_scale", 1.0))),
            1.0 if scalar is None else float(scalar),
            single_norm or bool(getattr(layer, "use_parallel_residual", False)),
            experts=experts,
            input=layer_input,
            parallel_mixer=parallel_mixer,
        )

    def _read_layer_inputs(self) -> LayerInputs | None:
        """Return the weights that compute per-layer inputs (Gemma 4); None if the family has no
        such inputs."""
        base = self.base
        width = int(getattr(base, "hidden_size_per_layer_input", 0) or 0)
        if not width:
            return None
        known = hasattr(base, "per_layer_model_projection_scale")
        self.require(known, "per-layer inputs of another kind")
        table, product = (
            base.embed_tokens_per_layer,
            self.read_linear(base.per_layer_model_projection),
        )
        embeddings: Any = self.network.get_input_embeddings()
        vocabulary = embeddings.weight.shape[0]
        known = width % LANES == 0 and table.weight.shape == (vocabulary, len(product.weight))
        self.require(known and product.bias is None, "per-layer inputs of other shapes")
        self.read_weights.add(id(table.weight))
        return LayerInputs(
            width,
            self.make_linear(table.weight),
            product,
            self.read_norm(base.per_layer_projection_norm, width),
            float(table.embed_scale),
            float(base.per_layer_model_projection_scale),
            float(base.per_layer_input_scale),
        )

    def _read_layer_input(self, layer: Any, width: int) -> LayerInput:
        """Return the weights with which a layer uses its slice of the per-layer inputs."""
        same = self.read_activation(layer) == self.read_activation(layer.mlp)
        self.require(same, "per-layer inputs with another activation than the MLP's")
        gate, out = layer.per_layer_input_gate, layer.per_layer_projection
        norm = self.read_norm(layer.post_per_layer_input_norm)
        at = layer.self_attn.layer_idx * width
        return LayerInput(self.read_linear(gate), self.read_linear(out), norm, at)

    def _read_one_part_layer(self, layer: Any, window: int) -> DecoderLayer:
        """Return a layer that has one norm and one part (Nemotron-H): attention, a recurrence, an
        MLP or experts."""
        part, norm = layer.mixer, self.read_norm(layer.norm)
        if hasattr(part, "A_log"):
            return DecoderLayer((norm, None, None, None), read_recurrence(self, part), None)
        if any(hasattr(part, name) for name in OUTPUT_NAMES):
            return DecoderLayer((norm, None, None, None), self._read_attention(part, window), None)
        norms = None, None, norm, None
        if not hasattr(part, "experts"):
            return DecoderLayer(norms, None, self.read_mlp(part))
        projected = any([*getattr(part, name).parameters()] for name in EXPERT_LATENT_NAMES)
        self.require(not projected, "experts on projected hidden states")
        experts, gated = read_experts(self, part, None)
        return DecoderLayer(norms, None, gated, experts=experts)

    def _read_mixers(
        self, layer: Any, window: int
    ) -> tuple[Attention | RecurrentMixer, RecurrentMixer | None]:
        """Return a layer's attention or recurrence, and None; or, if the layer has both in parallel
        (Falcon-H1), the attention and the recurrence."""
        mixer = next((p for name in MIXER_NAMES if (p := getattr(layer, name, None))), None)
        if mixer is not None and not any(getattr(layer, name, None) for name in ATTENTION_NAMES):
            return read_recurrence(self, mixer), None
        part = self.find_part(layer, ATTENTION_NAMES, "attention")
        attention = self._read_attention(getattr(part, "attention", part), window)
        if mixer is None:
            return attention, None
        parallel_mixer = read_recurrence(self, mixer)
        return scale_attention(layer, attention), scale_mixer(layer, parallel_mixer)

    def _read_attention(self, part: Any, window: int) -> Attention:
        if hasattr(part, "kv_a_proj_with_mqa"):
            self.require(not window, "latent attention with a sliding window")
            return read_latents(self, part)
        width: Any = getattr(part, "head_dim", getattr(part, "head_size", None))
        self.require(isinstance(width, int), "attention heads of unknown width")
        self.require(width <= MAX_HEAD_WIDTH, f"head width {width}, above {MAX_HEAD_WIDTH}")
        out = self.read_linear(self.find_part(part, OUTPUT_NAMES, "attention's output"))
        heads = out.weight.shape[1] // width
        fused = next((p for name in FUSED_QKV_NAMES if (p := getattr(part, name, None))), None)
        gate: Linear | None = None
        kv_source = (
            self._find_kv_source_layer(part.layer_idx)
            if hasattr(part, "is_kv_shared_layer")
            else None
        )
        if kv_source is not None:
            projections = [self.read_linear(part.q_proj)]
        elif fused is None:
            own = [getattr(part, f"{name}_proj", None) for name in "qkv"]
            projections = [self.read_linear(one) for one in (*own[:2], own[2] or own[1])]
            gates = next(
                (p for name in ATTENTION_GATE_NAMES if (p := getattr(part, name, None))), None
            )
            gate = gates and self.read_linear(gates)
            if len(projections[0].weight) == 2 * heads * width:
                # rows of the weight: each head's queries, then the head's gates
                rows = np.arange(2 * heads * width).reshape(heads, 2, width)
                gate, projections[0] = (
                    projections[0].select_outputs(rows[:, i].ravel()) for i in (1, 0)
                )
        else:
            projections = self._split_fused(part, self.read_linear(fused), heads, width)
        if kv_source is None:
            key_heads = len(projections[1].weight) // width
        else:
            key_heads = heads // part.num_key_value_groups
        fits = key_heads and heads % key_heads == 0 and heads // key_heads <= MAX_QUERY_GROUP
        sizes = [len(x.weight) for x in projections]
        same = sizes[0] == heads * width and {*sizes[1:]} <= {key_heads * width}
        self.require(bool(fits and same), f"{heads} query heads with {key_heads} key heads")
        named = [
            next((p for n in names if (p := getattr(part, n, None))), None)
            for names in QKV_NORM_NAMES
        ]
        slopes = self._read_slopes(heads)
        rope, query_rope, last = None, None, False
        if slopes is None and self.positions is None and self.has_positions(part):
            rotates, last = self._try_rotation(part, projections[0].weight.shape[1], named[1])
            rope, query_rope = self._read_ropes(part, width) if rotates else (None, None)
        sinks = getattr(part, "sinks", None)
        if sinks is not None:
            self.read_weights.add(id(sinks))
        if getattr(part, "attention_type", None) == "local":
            window = int(self.config.window_size)
        scale = next(
            (s for name in SCALE_NAMES if (s := getattr(part, name, None)) is not None), None
        )
        return Attention(
            projections,
            out,
            heads,
            key_heads,
            width,
            float(1 / getattr(part, "scale_attn", 1.0) if scale is None else scale),
            window,
            float(getattr(part, "attn_logit_softcapping", None) or 0),
            float(getattr(part, "clip_qkv", getattr(self.config, "clip_qkv", None)) or 0),
            tuple(one and self.read_norm(one, width) for one in named),
            last,
            None if sinks is None else to_float_array(sinks),
            slopes,
            rope,
            query_rope,
            kv_source_layer=kv_source,
            gate=gate,
        )

    def _split_fused(self, part: Any, one: Linear, heads: int, width: int) -> list[Linear]:
        """Return queries, keys and values as three layers, split from a fused layer whose rows are
        in the family's order."""
        rows = np.arange(len(one.weight))
        key_heads = (len(rows) // width - heads) // 2
        fits = len(rows) == (heads + 2 * key_heads) * width and key_heads > 0
        fits = fits and heads % key_heads == 0
        self.require(fits, "fused queries, keys and values of another shape")
        if hasattr(part, "query_key_value") or getattr(part, "multi_query", None) is False:
            each = rows.reshape(key_heads, -1, width)  # per key head: its queries, key and value
            orders = [each[:, :-2], each[:, -2], each[:, -1]]
        elif hasattr(part, "embed_positions"):
            each = rows.reshape(NUM_CODEGEN_PARTS, 3, -1)
            orders = [each[:, 0], each[:, 2], each[:, 1]]
        else:
            orders = np.split(rows, [heads * width, (heads + key_heads) * width])
        return [one.select_outputs(order.ravel()) for order in orders]

    def read_mlp(self, part: Any) -> GatedMLP:
        """Return an MLP, with or without a gate. Raises RefusedError if its layers have unknown
        names."""
        for names in FUSED_MLP_NAMES:
            if all(hasattr(part, name) for name in names):
                both, down = (self.read_linear(getattr(part, name)) for name in names)
                gate, up = (
                    both.select_outputs(rows) for rows in np.split(np.arange(len(both.weight)), 2)
                )
                return GatedMLP(gate, up, down, *self.read_activation(part))
        for names in GATED_MLP_NAMES + PLAIN_MLP_NAMES:
            if all(hasattr(part, name) for name in names):
                *gate, up, down = (self.read_linear(getattr(part, name)) for name in names)
                gate = gate[0] if gate else None
                if hasattr(part, "gate_multiplier"):
                    assert gate is not None
                    gate = gate.scale_by(1.0, part.gate_multiplier)
                    down = down.scale_by(1.0, part.down_multiplier)
                return GatedMLP(gate, up, down, *self.read_activation(part))
        raise self.make_refusal("no MLP of a known name")

    def read_activation(self, part: Any) -> tuple[str, tuple[float, ...]]:
        """Return an activation's name, found by comparing results with known activations, and its
        parameters (see `GatedMLP.curve`)."""
        if not any(hasattr(part, name) for name in ACTIVATION_FIELDS) and hasattr(part, "w3"):
            return self._infer_written_activation(part), (0.0, 0.0, 0.0)
        one = self.find_part(part, ACTIVATION_FIELDS, "activation")
        states = torch.linspace(-8, 8, 65)
        with torch.no_grad(), suppress(Exception):  # a family's own code raises anything
            made = one(states)
            for name, act in ACTIVATIONS.items():
                if torch.allclose(made, act(states), rtol=0, atol=RELATIVE_TOLERANCE):
                    return name, (0.0, 0.0, 0.0)
            x, below = made.double()[-1], made.double()[0]
            last = float(one.beta)
            curve = (float((x - 8 * last) / 64), float((below + 8 * last) / (np.exp(-8) + 7)), last)
            squares = curve[0] * states.clamp(0).square() + last * states
            low = states.clamp(max=0)
            if torch.allclose(
                made,
                squares + curve[1] * (low.expm1() - low),
                rtol=RELATIVE_TOLERANCE,
                atol=RELATIVE_TOLERANCE,
            ):
                self.read_weights |= {
                    id(weight) for weight in one.state_dict(keep_vars=True).values()
                }
                return XIELU, curve
        raise self.make_refusal(f"unknown activation {type(one).__name__}")

    def _infer_written_activation(self, part: Any) -> str:
        """Return the name of the activation of a gated MLP that has no activation module. It is
        found by comparing the MLP's results with its formula for each known activation."""
        states = make_random_states(7, self.config.hidden_size)
        with torch.no_grad(), suppress(Exception):  # a family's own code raises anything
            made = part(states)
            for name, act in ACTIVATIONS.items():
                own = part.w2(act(part.w1(states)) * part.w3(states))
                if torch.allclose(made, own, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE):
                    return name
        raise self.make_refusal("an unknown activation")

    def make_linear(self, weight: Tensor, bias: Tensor | None = None) -> Linear:
        """Return a `Linear` of a weight that is a parameter, not part of a linear module."""
        return Linear(to_float_array(weight), None if bias is None else to_float_array(bias))

    def read_linear(self, part: Any) -> Linear:
        """Return a linear layer. Raises RefusedError if the module computes anything else."""
        weight: Any = getattr(part, "weight", None)
        known = isinstance(part, nn.Linear | Conv1D)
        self.require(known, f"a {type(part).__name__} in place of a linear layer")
        weight, bias = weight.T if isinstance(part, Conv1D) else weight, part.bias
        if type(part) not in (nn.Linear, Conv1D):
            states = make_random_states(2, weight.shape[1])
            with torch.no_grad():
                same = torch.allclose(
                    part(states),
                    functional.linear(states, weight, bias),
                    rtol=RELATIVE_TOLERANCE,
                    atol=RELATIVE_TOLERANCE,
                )
            self.require(same, f"a {type(part).__name__} in place of a linear layer")
        self.read_weights |= {id(weight) for weight in part.parameters()}
        return Linear(to_float_array(weight), None if bias is None else to_float_array(bias))

    def read_norm(self, part: Any, width: int = 0) -> Norm:
        """Return a norm. The formula is found by comparing results, because families differ: some
        add 1 to the weight, some have no weight."""
        self.read_weights |= {id(weight) for weight in part.parameters()}
        scale, bias = getattr(part, "weight", None), getattr(part, "bias", None)
        if scale is None and (each := [*getattr(part, "norms", [])]):  # a norm for each head
            norms = [self.read_norm(one) for one in each]
            weight = np.stack([norm.weight for norm in norms])
            alike = all(norm.bias is None for norm in norms)
            self.require(alike, "norms of heads with a bias")
            return Norm(weight, norms[0].epsilon, None, norms[0].centred)
        ones = torch.ones(width or self.config.hidden_size)
        weights = [ones] if scale is None else [scale, scale + 1]
        named = ("variance_epsilon", "eps", "epsilon")
        epsilon = next((e for n in named if (e := getattr(part, n, None)) is not None), 1e-5)
        large = make_random_states(*weights[0].shape) + 0.5
        states = torch.stack([large, large.flip(-1) / 100])  # epsilon changes small ones visibly
        with torch.no_grad():
            made = part(states)
            for centred in (False, True):
                x = states - states.mean(-1, keepdim=True) if centred else states
                unit = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + epsilon)
                for weight in weights:
                    own = unit * weight if bias is None else unit * weight + bias
                    if torch.allclose(made, own, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE):
                        added = None if bias is None else to_float_array(bias)
                        return Norm(to_float_array(weight), float(epsilon), added, centred)
        raise self.make_refusal(f"unknown norm {type(part).__name__}")

    def _read_slopes(self, heads: int) -> Floats | None:
        """Return ALiBi's slopes; None if the family does not use ALiBi. Raises RefusedError if
        ALiBi's biases are not linear in the position."""
        if hasattr(self.base, "build_mpt_alibi_tensor"):
            table = self.base.build_mpt_alibi_tensor(heads, NUM_ALIBI_TRIAL_POSITIONS)
        elif hasattr(self.base, "build_alibi_tensor"):
            table = self.base.build_alibi_tensor(
                torch.ones(1, NUM_ALIBI_TRIAL_POSITIONS), heads, torch.float32
            )
        else:
            self.require(not getattr(self.base, "use_alibi", False), "ALiBi of rounded positions")
            return None
        table = table.reshape(heads, NUM_ALIBI_TRIAL_POSITIONS).double()
        slopes = (table[:, -1] - table[:, 0]) / (NUM_ALIBI_TRIAL_POSITIONS - 1)
        line = slopes[:, None] * torch.arange(NUM_ALIBI_TRIAL_POSITIONS) + table[:, :1]
        self.require(
            torch.allclose(table, line, rtol=RELATIVE_TOLERANCE, atol=1e-3), "ALiBi of another kind"
        )
        return to_float_array(slopes)

    def _read_ropes(self, part: Any, width: int) -> tuple[int, int]:
        """Return a layer's rotary positions, for keys and for queries, as indices in `ropes`."""
        rope = self._infer_rope(part, width)
        settings: Any = getattr(self.config, "rope_parameters", None) or {}
        growth = None
        if self.has_growing_queries():
            beta, first = settings["llama_4_scaling_beta"], "original_max_position_embeddings"
            growth = float(beta), int(settings[first])
            rotates_all = 2 * len(rope.frequencies) == width
            self.require(rotates_all, "scaled queries with partial rotary positions")
        return self.add_rope(rope), self.add_rope(replace(rope, growth=growth))

    def has_growing_queries(self) -> bool:
        """Return whether queries are scaled by a factor that grows with their position (Llama
        4)."""
        settings: Any = getattr(self.config, "rope_parameters", None) or {}
        return bool(settings.get("llama_4_scaling_beta"))

    def add_rope(self, rope: Rope) -> int:
        """Return the index of `rope` in `ropes`; add it if it is missing."""
        if rope not in self.ropes:
            self.ropes.append(rope)
        return self.ropes.index(rope)

    def find_rotary(self, part: Any) -> Any:
        """Return the module that computes cosines and sines for a layer's attention."""
        owner = self.base if any(hasattr(self.base, name) for name in ROTARY_MODULE_NAMES) else part
        return self.find_part(owner, ROTARY_MODULE_NAMES, "rotary positions")

    def _infer_rope(self, part: Any, width: int) -> Rope:
        """Return a layer's rotary positions, found by rotating random states at a few positions
        with the family's code."""
        # small positions: in some families, the frequencies depend on the largest position
        last_position = min(100, (get_context_limit(self.config) or 200) // 2)
        positions = torch.tensor([[0, 1, 2, 3, last_position // 2, last_position]])
        cosine, sine, frequencies = self._compute_cosines(part, positions)
        states, scale = (
            make_random_states(1, 1, positions.shape[1], 2 * len(frequencies)),
            float(cosine[0, 0, 0]),
        )
        rotated = self._rotate(part, states, cosine, sine)
        angles = (positions[0, :, None] * frequencies.float()).double()
        for interleaved in (False, True):
            for sign in (1, -1):  # some families rotate the other way
                expected = rotate_pairs(states, sign * angles, scale, interleaved)
                if rotated.shape == expected.shape and torch.allclose(
                    rotated.double(), expected, atol=RELATIVE_TOLERANCE
                ):
                    self.require(states.shape[-1] <= width, "rotary positions wider than a head")
                    turns = (sign * frequencies.double()).tolist()
                    return Rope(tuple(turns), scale, interleaved)
        raise self.make_refusal("rotary positions of another kind")

    def _compute_cosines(self, part: Any, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return cosines and sines at positions `[1, n]`, computed by the family's code, and the
        frequencies."""
        table = getattr(part, "embed_positions", None)
        if isinstance(table, Tensor):  # its rows are sines, then cosines
            pairs = table.shape[1] // 2
            sine, cosine = table[positions].split(pairs, -1)
            return cosine, sine, 1.0 / 10000 ** (torch.arange(0, 2 * pairs, 2) / (2 * pairs))
        rotary = self.find_rotary(part)
        kinds: list[str] = getattr(self.config, "layer_types", None) or []
        by_kind = "layer_type" in inspect.signature(rotary.forward).parameters
        more = {"layer_type": kinds[part.layer_idx]} if by_kind else {}
        prefix = f"{kinds[part.layer_idx]}_" if by_kind else ""
        self.require(hasattr(rotary, f"{prefix}inv_freq"), "rotary positions in only some layers")
        return *rotary(torch.zeros(1), positions, **more), getattr(rotary, f"{prefix}inv_freq")

    def _rotate(self, part: Any, states: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        """Apply rotary positions to states `[1, 1, n, width]` with the family's own function."""
        apply: Any = getattr(sys.modules[type(part).__module__], ROTARY_FUNCTION, None)
        self.require(apply is not None, "no known function for rotary positions")
        first, second, *_ = inspect.signature(apply).parameters
        if first == "tensor":  # it takes [B, n, heads, width]
            return apply(states.transpose(1, 2), sin=sine, cos=cosine).transpose(1, 2)
        if second == "k":
            return apply(states, states, cosine, sine)[0]
        return apply(states, cosine, sine)

    def has_positions(self, part: Any) -> bool:
        """Return whether the network or this attention has rotary positions, and neither has set
        them to None."""
        names = *ROTARY_MODULE_NAMES, "embed_positions"
        owned = [getattr(one, name, self) for one in (self.base, part) for name in names]
        return None not in owned and any(x is not self for x in owned)

    def _try_rotation(self, part: Any, inputs: int, norm: Any) -> tuple[bool, bool]:
        """Run attention with and without rotation. Return whether the results differ, and whether
        the inputs of the keys' norm differ, that is, whether the norm comes after the rotation."""
        cosine, sine, _ = self._compute_cosines(part, torch.arange(4)[None])
        states, norm_inputs = make_random_states(1, 4, inputs), list[Tensor]()
        hook = norm and norm.register_forward_pre_hook(
            lambda _, args: norm_inputs.append(args[0].clone())
        )
        try:
            made = [
                part(states, position_embeddings=pair, attention_mask=None)[0]
                for pair in ((torch.ones_like(cosine), torch.zeros_like(sine)), (cosine, sine))
            ]
        except Exception:  # a family's own code raises anything, such as for missing arguments
            return True, False
        finally:
            if hook:
                hook.remove()
        return not torch.equal(*made), bool(norm_inputs) and not torch.equal(*norm_inputs)

    def find_part(self, part: Any, names: tuple[str, ...], what: str) -> Any:
        """Return the module in `part` that has one of these names. Raises RefusedError if there is
        none. what: Name of the module in the message."""
        name = next((name for name in names if hasattr(part, name)), None)
        if name is None:
            raise self.make_refusal(f"no {what} of a known name")
        return getattr(part, name)

    def require(self, known: bool, what: str) -> None:
        """Raise RefusedError unless `known` is True. `what` describes the unsupported part."""
        if not known:
            raise self.make_refusal(what)

    def make_refusal(self, what: str) -> RefusedError:
        return RefusedError(
            f"{type(self.network).__name__} is not built as the native decoder expects ({what})"
        )
