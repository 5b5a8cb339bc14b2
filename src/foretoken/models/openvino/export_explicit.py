"""Export of a transformers model to OpenVINO graphs over an explicit cache.

transformers' own forward is traced once, over a cache whose past is an input. Keys and values of
the past are inputs and only those of new tokens are outputs: a graph copies nothing, and its caller
owns the cache. Attention scores past and new tokens apart and joins the scores, so the past is read
in place. Masks, windows, positions and T5's relative bias follow each row's own length. Does not
know how graphs are compiled, kept or fed.
"""

from __future__ import annotations

from typing import Any

import openvino as ov
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
)
from transformers.modeling_outputs import BaseModelOutput

from foretoken.errors import RefusedError
from foretoken.models.openvino.tracing import Exported, traced
from foretoken.models.stock.attention import Forward, KeptPositions
from foretoken.models.stock.cache import admit, given, growing_cache, has_own_attention
from foretoken.models.stock.media import encoder_input, encoder_weights, made_up, random_states
from foretoken.models.stock.positions import RUNNING, takes_positions
from foretoken.models.stock.sizes import (
    context_limit,
    encoder_limit,
    encoder_rows,
    output_rows,
)

HIDDEN = -1e30  # added to scores that must not count; finite in bfloat16 too
Pairs = list[tuple[Tensor, Tensor]]


class Fresh(DynamicCache):
    """A transformers cache without a past, which notes the new keys and values."""

    def __init__(self) -> None:
        super().__init__()
        self.fresh: Pairs = []  # of the layers that have run

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        assert layer_idx == len(self.fresh)
        self.fresh.append((key_states, value_states))
        return key_states, value_states


class Block(Fresh):
    """New tokens of rows of different lengths, and which keys each of them attends to."""

    def __init__(self, past: Pairs, lengths: Tensor, width: Any) -> None:
        super().__init__()
        self.past, self.lengths = past, lengths
        capacity = past[0][0].shape[2]
        self.positions = lengths[:, None] + torch.arange(width)  # [B, n]: slots too
        slots = torch.arange(capacity).expand(lengths.shape[0], -1)
        self.keys_at = torch.cat([slots, self.positions], 1)  # [B, capacity + n]
        self.filled = torch.cat([slots < lengths[:, None], self.positions >= 0], 1)
        self.capacity, self.width = capacity, width
        self.bias: Tensor | None = None

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.lengths

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.capacity + query_length, 0

    def mask(self, rule: Any, dtype: torch.dtype) -> Tensor:
        """`[B, 1, n, capacity + n]`, to add: the model's rule at each row's own positions."""
        b = torch.arange(self.lengths.shape[0])[:, None, None, None]
        q, kv = self.positions[:, None, :, None], self.keys_at[:, None, None, :]
        return additive(rule(b, b.new_zeros(1, 1, 1, 1), q, kv) & self.filled[:, None, None], dtype)

    def relative(self, module: Any, mask: Tensor) -> Tensor:
        """T5's bias `[B, H, n, capacity + n]` at each row's own distances, with the mask."""
        if module.has_relative_attention_bias:
            buckets = module._relative_position_bucket(
                self.keys_at[:, None, :] - self.positions[:, :, None],
                bidirectional=False,
                num_buckets=module.relative_attention_num_buckets,
                max_distance=module.relative_attention_max_distance,
            )
            self.bias = module.relative_attention_bias(buckets).permute(0, 3, 1, 2) + mask
        assert self.bias is not None
        return self.bias


class WithSource(EncoderDecoderCache):
    """A block and, beside it, the keys and values of its rows' sources."""

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.self_attention_cache.get_query_offset(layer_idx)


class Slotted(Block):
    """A block that hands out keys and values of the past and of itself slot by slot, for attention
    that is a family's own code: any rule by slots is then exact. This copies the past."""

    def __init__(self, past: Pairs, lengths: Tensor, width: Any) -> None:
        super().__init__(past, lengths, width)
        self.end = self.capacity + width
        slots = torch.arange(self.end).expand(lengths.shape[0], -1)
        new = self.capacity + (slots - lengths[:, None]).clamp(min=0, max=width - 1)
        self.taken = torch.where(slots < lengths[:, None], slots, new)  # causality hides the rest
        self.keys_at, self.filled = slots, slots >= 0

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.capacity

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        new = super().update(key_states, value_states, layer_idx)
        both = [torch.cat(pair, 2) for pair in zip(self.past[layer_idx], new, strict=True)]
        index = self.taken[:, None, :, None]
        k, v = (x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])) for x in both)
        return k, v


def explicit_mask(
    *, mask_function: Any, attention_mask: Tensor | None, dtype: torch.dtype, **kwargs: Any
) -> Tensor | None:
    """The mask to add to scores: over past and block, or over a padded source."""
    block: Any = RUNNING.get().cache
    if block is not None and isinstance(kwargs["q_offset"], Tensor):
        return block.mask(mask_function, dtype)
    return None if attention_mask is None else additive(attention_mask[:, None, None, :], dtype)


def explicit_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attention `[B, n, H, dim]`: of a block over past and itself, or over a source."""
    block: Any = RUNNING.get().cache
    if block is not None and block.fresh and key is block.fresh[-1][0]:
        bias: Any = attention_mask
        if position_bias is not None:
            bias = block.relative(module, bias)
        query = query * (query.shape[-1] ** -0.5 if scaling is None else scaling)
        states = joined(query, block.past[len(block.fresh) - 1], (key, value), bias, softcap)
    else:
        bias = attention_mask
        if position_bias is not None and block is None:  # T5's encoder, before the mask is known
            bias = position_bias if bias is None else position_bias + bias
        states = F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    return states.transpose(1, 2).contiguous(), None


def joined(
    query: Tensor,
    past: tuple[Tensor, Tensor],
    new: tuple[Tensor, Tensor],
    bias: Tensor,
    softcap: float | None,
) -> Tensor:
    """Attention `[B, H, n, dim]` over past and new keys without putting them in one tensor.

    Query heads that share keys are stacked as one longer block.
    """
    b, heads, n, dim = query.shape
    key_heads, capacity = past[0].shape[1], past[0].shape[2]
    query = query.reshape(b, key_heads, -1, dim)
    scores = torch.cat([query @ keys.transpose(2, 3) for keys in (past[0], new[0])], -1)
    scores = scores.reshape(b, heads, n, -1)
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    weights = torch.softmax(scores + bias, -1).reshape(b, key_heads, -1, capacity + n)
    states = weights[..., :capacity] @ past[1] + weights[..., capacity:] @ new[1]
    return states.reshape(b, heads, n, -1)


def additive(mask: Tensor, dtype: torch.dtype) -> Tensor:
    return torch.where(mask, 0.0, HIDDEN).to(dtype)


def within(lengths: Tensor, width: Any) -> Tensor:
    """`[B, width]`, True in a row's first lengths[b] places."""
    return torch.arange(width) < lengths[:, None]


AttentionInterface.register("explicit", explicit_attention)
AttentionMaskInterface.register("explicit", explicit_mask)


def export_explicit(model: PreTrainedModel) -> Exported:
    """Graphs of `model`, which stays as it is; they read its weights in place.

    "decoder": ids [B, n], lengths [B] (tokens of each row in the cache), keep [N] (places b * n + i
    in the block that are needed) and, per layer, keys.i and values.i [B, heads, capacity, dim]
    -> logits [1, N, V], hidden [1, N, width] (what the head reads), new_keys and new_values
    [layers, B, heads, n, dim]. With an encoder also sources [B] (tokens of each row's source),
    cross_keys.i and cross_values.i [B, heads, S, dim], made by
    "encoder": ids [B, S], sources [B], or what else it reads, all of one size -> states [B, S, H];
    "cross": states -> cross_keys and cross_values [layers, B, heads, S, dim].

    Raises RefusedError for a model whose rows cannot be rolled back one by one.
    """
    admit(model)
    media = heard(model)
    past, cross = probe(model)
    two = torch.ones(2, dtype=torch.long)
    feed = {"ids": two[:, None].repeat(1, 3), "lengths": two, "keep": torch.arange(4)}
    graphs = {}
    if cross:
        feed["sources"] = two
        if media:
            graphs["encoder"] = recorded(MediaEncoder(model), media, ["states"], sized=True)
        else:
            inputs = {"ids": feed["ids"], "sources": two}
            graphs["encoder"] = recorded(EncoderGraph(model), inputs, ["states"])
        states = {"states": random_states(model, feed["ids"])}
        graphs["cross"] = recorded(CrossGraph(model), states, ["cross_keys", "cross_values"])
    feed |= {f"keys.{i}": k for i, (k, _) in enumerate(past)}
    feed |= {f"values.{i}": v for i, (_, v) in enumerate(past)}
    feed |= {f"cross_keys.{i}": k for i, (k, _) in enumerate(cross)}
    feed |= {f"cross_values.{i}": v for i, (_, v) in enumerate(cross)}
    outputs = ["logits", "hidden", "new_keys", "new_values"]
    graphs["decoder"] = recorded(DecoderGraph(model, list(feed)), feed, outputs)
    about = media_facts(model, media, graphs["encoder"]) if media else {}
    return Exported(graphs, facts(model, len(past)) | about)


def facts(model: PreTrainedModel, layers: int) -> dict[str, Any]:
    """Return the facts that a runner cannot read from the graphs."""
    seq2seq = bool(model.config.is_encoder_decoder)
    return {
        "form": "explicit",
        "class": type(model).__name__,
        "encoder_decoder": seq2seq,
        "layers": layers,
        "parameters": sum(weight.numel() for weight in model.parameters()),
        "vocab_size": output_rows(model),
        "context": context_limit(model.config.get_text_config(decoder=True)),
        "source_context": encoder_limit(model) if seq2seq else None,
        "source_vocab_size": encoder_rows(model) if seq2seq else None,
    }


def media_facts(
    model: PreTrainedModel, media: dict[str, Tensor], encoder: ov.Model
) -> dict[str, Any]:
    """Return the facts of an encoder of media: shapes, and a digest of its weights."""
    ((name, x),) = media.items()
    states = [*encoder.output(0).get_shape()]
    hears = {
        "input": name,
        "shape": [*x.shape],
        "states": states,
        "weights": encoder_weights(model),
    }
    return {"hears": hears, "source_context": states[1]}


def heard(model: PreTrainedModel) -> dict[str, Tensor] | None:
    """Return an example of what an encoder of media reads; None for one of text. RefusedError for
    media of many sizes."""
    if model.main_input_name == "input_ids" or not model.config.is_encoder_decoder:
        return None
    if inputs := made_up(model):
        return inputs
    raise RefusedError(
        f"{type(model).__name__} reads {model.main_input_name} of any size, and a graph of "
        "OpenVINO those of one; give runtime='transformers'"
    )


@torch.no_grad()
def probe(model: PreTrainedModel) -> tuple[Pairs, Pairs]:
    """Example keys and values of every layer, for two rows: of the past and of the source."""
    ids = torch.ones(2, 5, dtype=torch.long)
    own = DynamicCache()  # by the config T5 would get as many layers as its encoder has
    if not model.config.is_encoder_decoder:
        model(input_ids=ids, **given(model, own), use_cache=True)
        return pairs(own), []
    cache = EncoderDecoderCache(own, DynamicCache())
    sources = encoder_input(model, ids[:, :4])
    model(**sources, decoder_input_ids=ids, **given(model, cache), use_cache=True)
    return pairs(own), pairs(cache.cross_attention_cache)


def pairs(cache: Any) -> Pairs:
    return [(layer.keys, layer.values) for layer in cache.layers]


def recorded(
    graph: nn.Module, feed: dict[str, Tensor], outputs: list[str], *, sized: bool = False
) -> ov.Model:
    """The graph over inputs like `feed`, all sizes free but heads and the width of states; sized:
    none."""
    model = traced(graph.eval(), tuple(feed.values()))
    for port, (name, x) in zip(model.inputs, feed.items(), strict=True):
        shape = [*x.shape] if sized else [-1] * x.ndim
        if x.ndim == 4:
            shape[1] = x.shape[1]
        if x.is_floating_point():
            shape[-1] = x.shape[-1]
        port.get_node().set_partial_shape(ov.PartialShape(shape))
        port.get_tensor().set_names({name})
    for port, name in zip(model.outputs, outputs, strict=True):
        port.get_tensor().set_names({name})
    model.validate_nodes_and_infer_types()
    return model


class EncoderGraph(nn.Module):
    """Sources -> the encoder's states."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__()
        self.running = Forward(model, "explicit")
        self.model = self.running.model

    def forward(self, ids: Tensor, sources: Tensor) -> Tensor:
        mask = within(sources, ids.shape[1]).long()
        with self.running(None):
            return self.model.get_encoder()(input_ids=ids, attention_mask=mask)[0]


class MediaEncoder(EncoderGraph):
    """Sounds or pictures -> the encoder's states."""

    def forward(self, inputs: Tensor) -> Tensor:  # pyright: ignore
        with self.running(None):
            return self.model.get_encoder()(inputs)[0]


class CrossGraph(EncoderGraph):
    """An encoder's states -> the keys and values that the decoder's cross-attention will read."""

    def forward(self, states: Tensor) -> tuple[Tensor, Tensor]:  # pyright: ignore
        with self.running(None):
            # The decoder runs for its cross-attention's projections; its logits are no output.
            cross = Fresh()
            self.model(
                decoder_input_ids=torch.zeros(states.shape[0], 1, dtype=torch.long),
                encoder_outputs=BaseModelOutput(last_hidden_state=states),  # pyright: ignore
                **given(self.model, EncoderDecoderCache(Fresh(), cross)),
                use_cache=True,
            )
        return stacked(cross.fresh)


class DecoderGraph(nn.Module):
    """A block of new tokens behind a past: logits where needed, and the new keys and values."""

    def __init__(self, model: PreTrainedModel, names: list[str]) -> None:
        super().__init__()
        self.running, self.names = Forward(model, "explicit"), names
        self.model = self.running.model
        self.block = Slotted if has_own_attention(self.model.get_decoder()) else Block
        self.takes_positions = takes_positions(model)

    def forward(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        feed = dict(zip(self.names, tensors, strict=True))
        layers = sum(name.startswith("keys.") for name in feed)
        past = [(feed[f"keys.{i}"], feed[f"values.{i}"]) for i in range(layers)]
        block = self.block(past, feed["lengths"], feed["ids"].shape[1])
        inputs = self.seq2seq(feed, block) if "sources" in feed else self.causal(feed, block)
        kept = KeptPositions(feed["keep"])
        with self.running(block, kept):  # pyright: ignore
            logits = self.model(**inputs, use_cache=True, return_dict=True).logits
        return logits.float(), kept.hidden, *stacked(block.fresh)

    def causal(self, feed: dict[str, Tensor], block: Block) -> dict[str, Any]:
        if not self.takes_positions:
            return {"input_ids": feed["ids"]} | given(self.model, block)
        positions = block.positions
        limit = context_limit(self.model.config.get_text_config(decoder=True))
        if limit is not None:
            positions = positions.clamp(max=limit - 1)  # padding only
        return {"input_ids": feed["ids"], "position_ids": positions} | given(self.model, block)

    def seq2seq(self, feed: dict[str, Tensor], block: Block) -> dict[str, Any]:
        cross = growing_cache(len(block.past))
        for i, layer in enumerate(cross.layers):
            layer.keys, layer.values = feed[f"cross_keys.{i}"], feed[f"cross_values.{i}"]
            layer.is_initialized = True
        cache = WithSource(block, cross)
        cache.is_updated = dict.fromkeys(range(len(block.past)), True)
        rows, _, width, _ = feed["cross_keys.0"].shape
        states = feed["cross_keys.0"].new_zeros(rows, width, 1)  # only its shape is read
        positions = {"decoder_position_ids": block.positions} if self.takes_positions else {}
        return positions | {
            "decoder_input_ids": feed["ids"],
            "encoder_outputs": BaseModelOutput(last_hidden_state=states),  # pyright: ignore
            "attention_mask": within(feed["sources"], width).long(),
            **given(self.model, cache),
        }


def stacked(layers: Pairs) -> tuple[Tensor, Tensor]:
    """`[layers, B, heads, n, dim]`, keys and values."""
    return torch.stack([k for k, _ in layers]), torch.stack([v for _, v in layers])
