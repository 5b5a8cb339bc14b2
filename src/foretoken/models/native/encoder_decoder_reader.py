"""Makes `Decoder` objects for the kernels from the modules of transformers' encoder-decoders, of
families that are built like T5 or BART."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.models.native.network import (
    RELATIVE_TOLERANCE,
    Attention,
    Decoder,
    DecoderLayer,
    Linear,
    to_float_array,
)
from foretoken.models.native.network_reader import NetworkReader
from foretoken.models.quantized_blocks import Floats
from foretoken.models.stock.media import make_encoder_input
from foretoken.models.stock.sizes import get_context_limit, get_encoder_limit, takes_ids

PROJECTION_NAMES = ("q", "k", "v", "o"), ("q_proj", "k_proj", "v_proj", "out_proj")
LAYER_LIST_NAMES, STACK_NORM_NAMES = ("block", "layers"), ("final_layer_norm", "layer_norm")
# Names of a layer's modules: attention and its norm, cross-attention and its norm, the MLP's norm
SELF_ATTENTION_NAMES = "self_attn", "self_attn_layer_norm"
CROSS_ATTENTION_NAMES = "encoder_attn", "encoder_attn_layer_norm"
MLP_NORM_NAME = "final_layer_norm"


class EncoderDecoderStacks(NamedTuple):
    """The networks that an encoder-decoder consists of on the kernels."""

    encoder: Decoder | None  # None: the encoder takes images or audio, and runs on torch
    cross_kv: Decoder  # computes the keys and values of cross-attention from hidden states
    decoder: Decoder


class EncoderDecoderReader(NetworkReader):
    """Makes the networks of an encoder-decoder, and records which of its weights it has used."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__(network)
        self.distance_biases: list[Floats] = []  # tables of the stack that is being read

    def read_stacks(self) -> EncoderDecoderStacks:
        """Return the model's networks. Raises RefusedError if the kernels do not support one of
        them."""
        stack: Any = self.network.get_encoder()
        own: Any = self.network.get_decoder()
        inner = own.get_decoder()  # the decoder without its head, if it has one
        decoder, parts = self._read_stack(inner, get_context_limit(self.config))
        keys = [self._read_cross_kv(part) for part in parts]
        assert keys[0].attention is not None
        width = keys[0].attention.projections[0].weight.shape[1]
        cross_kv = Decoder(width, keys)
        encoder = None
        if takes_ids(self.network):
            encoder, _ = self._read_stack(stack, get_encoder_limit(self.network))
        else:
            self.read_weights |= {
                id(weight) for weight in stack.state_dict(keep_vars=True).values()
            }
        head: Any = self.network.get_output_embeddings()
        self.require(head is not None, "no output layer")
        linear = self.read_linear(head)
        bias = getattr(self.network, "final_logits_bias", None)
        if bias is not None:
            self.read_weights.add(id(bias))
            linear = Linear(linear.weight, to_float_array(bias).ravel() if bias.any() else None)
        decoder.head, decoder.scale = linear, self._infer_logit_factor(head)
        self._require_all_read()
        return EncoderDecoderStacks(encoder, cross_kv, decoder)

    def _infer_logit_factor(self, head: Any) -> float:
        """Return the factor by which the model scales the head's input, and so the logits. It is
        found by running the network; T5 has such a factor if its embeddings are tied."""
        head_inputs, token = list[Tensor](), torch.tensor([[0]])
        given = {"decoder_input_ids": token, **make_encoder_input(self.network, token)}
        hook = head.register_forward_pre_hook(lambda _, args: head_inputs.append(args[0]))
        try:
            made = self.network(**given, output_hidden_states=True).decoder_hidden_states[-1]
        finally:
            hook.remove()
        factor = float((head_inputs[-1] / made).median())
        same = torch.allclose(
            head_inputs[-1], made * factor, rtol=RELATIVE_TOLERANCE, atol=RELATIVE_TOLERANCE
        )
        self.require(same, "a head whose input is not the last hidden states")
        return factor

    def _read_stack(self, stack: Any, limit: int | None) -> tuple[Decoder, list[Any]]:
        """Return the network of an encoder or decoder, without a head, and the stack's
        cross-attention modules. limit: The stack's context length."""
        self.distance_biases = []
        self.base = stack
        self.positions = self._read_positions(limit)
        layers, cross_attentions = list[DecoderLayer](), list[Any]()
        last = next((p for name in STACK_NORM_NAMES if (p := getattr(stack, name, None))), None)
        norms_after = last is None  # post-norm: norms come after the residual addition
        for layer in self.find_part(stack, LAYER_LIST_NAMES, "layers"):
            attention, cross, mlp = self._find_parts(layer)
            own = self._read_attention_layer(*attention, norm_after_add=norms_after)
            if cross is None:
                layers.append(self._add_mlp(own, mlp, norm_after_add=norms_after))
                continue
            cross_attentions.append(cross[0])
            cross_layer = self._read_attention_layer(
                *cross, norm_after_add=norms_after, attends_to_source=True
            )
            layers += [own, self._add_mlp(cross_layer, mlp, norm_after_add=norms_after)]
        embedded = getattr(stack, "layernorm_embedding", None)
        made = Decoder(
            self.config.d_model,
            layers,
            self.positions,
            embedded and self.read_norm(embedded),
            last and self.read_norm(last),
            embeddings=self._compute_embeddings(stack),
            embedded_weight=stack.embed_tokens.weight,
            distance_biases=self.distance_biases,
        )
        return made, cross_attentions

    def _find_parts(self, layer: Any) -> tuple[tuple[Any, Any], tuple[Any, Any] | None, Any]:
        """Return a layer's attention, cross-attention (or None) and MLP, each as a pair with its
        norm."""
        if hasattr(layer, "layer"):  # T5's
            first, *cross, last = layer.layer
            self.require(hasattr(first, "SelfAttention"), "attention to only a part of the source")
            cross_attention = (cross[0].EncDecAttention, cross[0].layer_norm) if cross else None
            mlp = next(iter(last.children()))
            return (first.SelfAttention, first.layer_norm), cross_attention, (mlp, last.layer_norm)
        known = all(hasattr(layer, name) for name in (*SELF_ATTENTION_NAMES, MLP_NORM_NAME))
        self.require(known, "layers with unknown modules")
        own = tuple(getattr(layer, name) for name in SELF_ATTENTION_NAMES)
        cross_attention = (
            tuple(getattr(layer, name) for name in CROSS_ATTENTION_NAMES)
            if hasattr(layer, CROSS_ATTENTION_NAMES[0])
            else None
        )
        return own, cross_attention, (layer, getattr(layer, MLP_NORM_NAME))

    def _read_attention_layer(
        self, part: Any, norm: Any, *, norm_after_add: bool, attends_to_source: bool = False
    ) -> DecoderLayer:
        """Return a layer that consists of this attention and its norm only."""
        projections, out = self._read_projections(part)
        heads, width = self._get_heads(part, projections[0])
        attention = Attention(
            projections[:1] if attends_to_source else projections,
            out,
            heads,
            heads,
            width,
            float(part.scaling),
            attends_to_source=attends_to_source,
            bias=0 if attends_to_source else self._read_distance_bias(part),
        )
        own = self.read_norm(norm)
        norms = (None, own, None, None) if norm_after_add else (own, None, None, None)
        return DecoderLayer(norms, attention, None, norm_after_add=norm_after_add)

    def _add_mlp(self, layer: DecoderLayer, mlp: Any, *, norm_after_add: bool) -> DecoderLayer:
        part, norm = mlp
        before, after, *_ = layer.norms
        own = self.read_norm(norm)
        norms = (before, after, None, own) if norm_after_add else (before, after, own, None)
        return replace(layer, norms=norms, gated=self.read_mlp(part))

    def _read_cross_kv(self, part: Any) -> DecoderLayer:
        """Return a layer that computes cross-attention's keys and values from hidden states."""
        (queries, *projections), _ = self._read_projections(part)
        _, width = self._get_heads(part, queries)
        heads = len(projections[0].weight) // width
        attention = Attention(projections, None, 0, heads, width, 1.0)
        return DecoderLayer((None, None, None, None), attention, None)

    def _read_projections(self, part: Any) -> tuple[list[Linear], Linear]:
        names = next((n for n in PROJECTION_NAMES if all(hasattr(part, one) for one in n)), None)
        if names is None:
            raise self.make_refusal(f"unknown attention {type(part).__name__}")
        *projections, out = (self.read_linear(getattr(part, name)) for name in names)
        return projections, out

    def _get_heads(self, part: Any, queries: Linear) -> tuple[int, int]:
        """Return the number of attention heads, and their width."""
        heads = getattr(part, "n_heads", getattr(part, "num_heads", None))
        self.require(isinstance(heads, int), "an unknown number of heads")
        assert isinstance(heads, int)
        return heads, len(queries.weight) // heads

    def _read_distance_bias(self, part: Any) -> int:
        """Read an attention's table of biases by distance; return its number in `distance_biases`,
        counted from 1. An attention without a table uses the stack's first table: return 1, or 0 if
        the stack has none."""
        learned = getattr(part, "relative_attention_bias", None)
        if learned is None:
            return min(1, len(self.distance_biases))
        n = int(part.relative_attention_max_distance) + 1
        biases = part.compute_bias(n, n)[0]  # [heads, queries, keys]
        self.read_weights.add(id(learned.weight))
        self.distance_biases.append(to_float_array(torch.cat([biases[:, -1], biases[:, 0, 1:]], 1)))
        return len(self.distance_biases)

    def _compute_embeddings(self, stack: Any) -> Tensor:
        """Return the embeddings of all ids of a stack, `[V, width]`."""
        table: Any = self.find_part(stack, ("embed_tokens",), "embeddings")
        return self.compute_vectors(table, float(getattr(stack, "embed_scale", 1.0)))
