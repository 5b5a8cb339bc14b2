"""The two stacks of layers of an encoder-decoder, read from transformers' modules, as T5, BART and
their kin are built."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.models.blocks import Floats
from foretoken.models.native.network import (
    SAME,
    Attention,
    Decoder,
    DecoderLayer,
    Linear,
    array,
)
from foretoken.models.native.reading import NetworkReader
from foretoken.models.stock.media import encoder_input
from foretoken.models.stock.sizes import context_limit, encoder_limit, reads_ids

PROJECTIONS = ("q", "k", "v", "o"), ("q_proj", "k_proj", "v_proj", "out_proj")
LAYERS, LAST_NORMS = ("block", "layers"), ("final_layer_norm", "layer_norm")
# Parts of a layer: attention, its norm, attention to the source, its norm, the MLP's norm
ATTENTION = "self_attn", "self_attn_layer_norm"
CROSS = "encoder_attn", "encoder_attn_layer_norm"
MLP_NORM = "final_layer_norm"


class BothStacks(NamedTuple):
    """An encoder-decoder as networks. `crossing` makes the keys and values to which the decoder
    attends of the encoder's states; encoder: None where it reads no ids, and runs on torch."""

    encoder: Decoder | None
    crossing: Decoder
    decoder: Decoder


class EncoderDecoderReader(NetworkReader):
    """Reads both stacks of a network, and notes what it has read."""

    def __init__(self, network: PreTrainedModel) -> None:
        super().__init__(network)
        self.tables: list[Floats] = []  # biases by distance, of the stack that is read

    def both(self) -> BothStacks:
        """Return both stacks. Raises RefusedError for a network that is built in another way."""
        stack: Any = self.network.get_encoder()
        own: Any = self.network.get_decoder()
        inner = own.get_decoder()  # of a decoder with a head, else itself
        decoder, parts = self._stack(inner, context_limit(self.config))
        keys = [self._keys_of(part) for part in parts]
        assert keys[0].attention is not None
        width = keys[0].attention.reads[0].weight.shape[1]
        crossing = Decoder(width, keys)
        encoder = None
        if reads_ids(self.network):
            encoder, _ = self._stack(stack, encoder_limit(self.network))
        else:
            self.read |= {id(weight) for weight in stack.state_dict(keep_vars=True).values()}
        head: Any = self.network.get_output_embeddings()
        self.require(head is not None, "its head")
        linear = self.linear(head)
        bias = getattr(self.network, "final_logits_bias", None)
        if bias is not None:
            self.read.add(id(bias))
            linear = Linear(linear.weight, array(bias).ravel() if bias.any() else None)
        decoder.head, decoder.scale = linear, self._logit_factor(head)
        self._require_all_read()
        return BothStacks(encoder, crossing, decoder)

    def _logit_factor(self, head: Any) -> float:
        """The factor of what the head reads, and so of logits, tried: T5 has one where embeddings
        are tied."""
        read, token = list[Tensor](), torch.tensor([[0]])
        given = {"decoder_input_ids": token, **encoder_input(self.network, token)}
        hook = head.register_forward_pre_hook(lambda _, args: read.append(args[0]))
        try:
            made = self.network(**given, output_hidden_states=True).decoder_hidden_states[-1]
        finally:
            hook.remove()
        factor = float((read[-1] / made).median())
        same = torch.allclose(read[-1], made * factor, rtol=SAME, atol=SAME)
        self.require(same, "a head of other states")
        return factor

    def _stack(self, stack: Any, limit: int | None) -> tuple[Decoder, list[Any]]:
        """Return a stack, without a head, and its parts that attend to a source."""
        self.tables = []
        self.base = stack
        self.positions = self._positions(limit)
        layers, crossing = list[DecoderLayer](), list[Any]()
        last = next((p for name in LAST_NORMS if (p := getattr(stack, name, None))), None)
        first = last is None  # then norms read what a part was added to
        for layer in self.one(stack, LAYERS, "layers"):
            attention, cross, mlp = self._parts(layer)
            own = self._attends(*attention, added_first=first)
            if cross is None:
                layers.append(self._with_mlp(own, mlp, added_first=first))
                continue
            crossing.append(cross[0])
            across = self._attends(*cross, added_first=first, source=True)
            layers += [own, self._with_mlp(across, mlp, added_first=first)]
        embedded = getattr(stack, "layernorm_embedding", None)
        made = Decoder(
            self.config.d_model,
            layers,
            self.positions,
            embedded and self.norm(embedded),
            last and self.norm(last),
            embeddings=self._embedded(stack),
            embedded_weight=stack.embed_tokens.weight,
            tables=self.tables,
        )
        return made, crossing

    def _parts(self, layer: Any) -> tuple[tuple[Any, Any], tuple[Any, Any] | None, Any]:
        """Return attention with its norm, attention to the source with its own, and the MLP with
        its norm."""
        if hasattr(layer, "layer"):  # T5's
            first, *cross, last = layer.layer
            self.require(hasattr(first, "SelfAttention"), "attention to a part of the source")
            across = (cross[0].EncDecAttention, cross[0].layer_norm) if cross else None
            mlp = next(iter(last.children()))
            return (first.SelfAttention, first.layer_norm), across, (mlp, last.layer_norm)
        known = all(hasattr(layer, name) for name in (*ATTENTION, MLP_NORM))
        self.require(known, "layers of other parts")
        own = tuple(getattr(layer, name) for name in ATTENTION)
        across = tuple(getattr(layer, name) for name in CROSS) if hasattr(layer, CROSS[0]) else None
        return own, across, (layer, getattr(layer, MLP_NORM))

    def _attends(
        self, part: Any, norm: Any, *, added_first: bool, source: bool = False
    ) -> DecoderLayer:
        """Return attention alone."""
        reads, out = self._projections(part)
        heads, width = self._heads(part, reads[0])
        attention = Attention(
            reads[:1] if source else reads,
            out,
            heads,
            heads,
            width,
            float(part.scaling),
            source=source,
            bias=0 if source else self._bias(part),
        )
        own = self.norm(norm)
        norms = (None, own, None, None) if added_first else (own, None, None, None)
        return DecoderLayer(norms, attention, None, added_first=added_first)

    def _with_mlp(self, layer: DecoderLayer, mlp: Any, *, added_first: bool) -> DecoderLayer:
        part, norm = mlp
        before, after, *_ = layer.norms
        own = self.norm(norm)
        norms = (before, after, None, own) if added_first else (before, after, own, None)
        return replace(layer, norms=norms, gated=self.gated(part))

    def _keys_of(self, part: Any) -> DecoderLayer:
        """Return a layer that makes the keys and values of a source, of what the encoder gives."""
        (queries, *reads), _ = self._projections(part)
        _, width = self._heads(part, queries)
        heads = len(reads[0].weight) // width
        attention = Attention(reads, None, 0, heads, width, 1.0)
        return DecoderLayer((None, None, None, None), attention, None)

    def _projections(self, part: Any) -> tuple[list[Linear], Linear]:
        names = next((n for n in PROJECTIONS if all(hasattr(part, one) for one in n)), None)
        if names is None:
            raise self.refused(f"attention by a {type(part).__name__}")
        *reads, out = (self.linear(getattr(part, name)) for name in names)
        return reads, out

    def _heads(self, part: Any, queries: Linear) -> tuple[int, int]:
        """Return how many heads attention has, and their width."""
        heads = getattr(part, "n_heads", getattr(part, "num_heads", None))
        self.require(isinstance(heads, int), "heads of no known number")
        assert isinstance(heads, int)
        return heads, len(queries.weight) // heads

    def _bias(self, part: Any) -> int:
        """Return the number of a part's biases by distance, from 1 on; 0: it has none. A part
        without its own has the first one's."""
        learned = getattr(part, "relative_attention_bias", None)
        if learned is None:
            return min(1, len(self.tables))
        n = int(part.relative_attention_max_distance) + 1
        biases = part.compute_bias(n, n)[0]  # [heads, queries, keys]
        self.read.add(id(learned.weight))
        self.tables.append(array(torch.cat([biases[:, -1], biases[:, 0, 1:]], 1)))
        return len(self.tables)

    def _embedded(self, stack: Any) -> Tensor:
        """Return the vectors that a stack reads for every id, `[V, width]`."""
        table: Any = self.one(stack, ("embed_tokens",), "embeddings")
        return self.vectors(table, float(getattr(stack, "embed_scale", 1.0)))
