"""Gemma 4's assistants: a few narrow layers that read the target's keys and values and have none.

transformers 5.23 cannot build its own, as no layer of theirs keeps keys for the others. Layers,
norms and rotary factors are transformers'; ours is what is around them. Knows no files.
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.models.gemma4.modeling_gemma4 import (
    Gemma4RMSNorm,
    Gemma4TextDecoderLayer,
    Gemma4TextRotaryEmbedding,
)

from foretoken.errors import RefusedError
from foretoken.models.base import Model
from foretoken.models.stock.attention import stacked_attention
from foretoken.transfer import send

SLIDING_ATTENTION = "sliding_attention"


class SharedKVConfig:
    """A text configuration as layers read it, none of which has keys of its own."""

    _attn_implementation = "lent_keys"
    hidden_size_per_layer_input = 0
    enable_moe_block = False

    def __init__(self, config: Any) -> None:
        self._config = config
        self.kv_sharing_modes = ["reuse"] * config.num_hidden_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)


class AssistantLayerInputs(NamedTuple):
    """All that the layers of one kind read, of one token of each row at its row's end."""

    rotary: tuple[Tensor, Tensor]
    mask: Tensor | None  # [B, 1, 1, K], True where a key is seen; None: everywhere
    keys: tuple[Tensor, Tensor]  # and values, [B, heads, K, dim]


class CentroidHead(nn.Module):
    """An output layer that computes logits for the tokens of the nearest `top_k` centroids; all
    others are impossible. Each row has its own."""

    def __init__(self, hidden_size: int, vocab_size: int, num_centroids: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.centroids = nn.Linear(hidden_size, num_centroids, bias=False)
        self.token_ordering = nn.Buffer(torch.zeros(vocab_size, dtype=torch.long))

    def forward(self, states: Tensor, weight: Tensor) -> Tensor:
        nearest = self.centroids(states).topk(self.top_k).indices
        ids = self.token_ordering.view(self.centroids.out_features, -1)[nearest].flatten(1)
        logits = torch.einsum("bh,bnh->bn", states, weight[ids])
        return logits.new_full((len(states), len(weight)), -torch.inf).scatter(1, ids, logits)


class Assistant(nn.Module):
    """The network of an assistant's config in transformers, its parts named as in its files. Raises
    RefusedError where this transformers builds other layers."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        text: Any = SharedKVConfig(config.get_text_config())
        H, V, width = text.hidden_size, text.vocab_size, config.backbone_hidden_size
        self.layer_types, self.sliding_window = list(text.layer_types), int(text.sliding_window)
        layers = [Gemma4TextDecoderLayer(text, j) for j in range(text.num_hidden_layers)]
        if any(hasattr(layer.self_attn, "k_proj") for layer in layers):
            raise RefusedError(
                "this release of transformers builds no layers for an assistant of Gemma 4; "
                "install transformers>=5.23"
            )
        norm = Gemma4RMSNorm(H, eps=text.rms_norm_eps)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": norm})
        with torch.device("cpu"):  # its factors follow from the configuration, also on meta
            self.rotary = Gemma4TextRotaryEmbedding(text)
        self.pre_projection = nn.Linear(2 * width, H, bias=False)
        self.post_projection = nn.Linear(H, width, bias=False)
        self.lm_head = nn.Linear(H, V, bias=False)
        self.masked_embedding = None
        if config.use_ordered_embeddings:
            self.masked_embedding = CentroidHead(
                H, V, config.num_centroids, config.centroid_intermediate_top_k
            )

    def forward(
        self, embedded: Tensor, states: Tensor, layer_inputs: dict[str, AssistantLayerInputs]
    ) -> tuple[Tensor, Tensor]:
        """Embeddings of tokens and the states before them, `[B, width]` each -> logits `[B, V]` of
        the tokens behind, and the states `[B, width]` before those."""
        x = self.pre_projection(torch.cat([embedded, states], -1))[:, None]
        for layer_type, layer in zip(
            self.layer_types, cast(Any, self.model["layers"]), strict=True
        ):
            x = layer(
                x,
                shared_kv_states={layer_type: layer_inputs[layer_type].keys},
                position_embeddings=layer_inputs[layer_type].rotary,
                attention_mask=layer_inputs[layer_type].mask,
            )
        x = self.model["norm"](x)[:, 0]
        if self.masked_embedding is None:
            return self.lm_head(x), self.post_projection(x)
        return self.masked_embedding(x, self.lm_head.weight), self.post_projection(x)


class StockAssistant:
    """An assistant on torch, over the rows of a target, which stay as they are."""

    runtime = "transformers"

    def __init__(self, network: Assistant, target: Model) -> None:
        self.network, self.target = network, target
        weight = network.lm_head.weight
        self.identity = f"assistant {len(network.layer_types)} {tuple(weight.shape)} {weight.dtype}"
        self._layer_inputs: dict[str, AssistantLayerInputs] = {}

    def with_target(self, target: Model) -> StockAssistant:
        """The same over another target."""
        return StockAssistant(self.network, target)

    @torch.inference_mode()
    def begin(self, rows: list[int]) -> None:
        """Take the target's rows that the next steps are for, as long as they are now."""
        kinds = dict.fromkeys(self.network.layer_types)
        self._layer_inputs = {kind: self._make_layer_inputs(kind, rows) for kind in kinds}

    def _make_layer_inputs(self, layer_type: str, rows: list[int]) -> AssistantLayerInputs:
        """A token behind each row's last, which sees what a target's there would, but itself."""
        lengths, weight = [self.target.lengths[b] for b in rows], self.network.lm_head.weight
        window = (
            self.network.sliding_window if layer_type == SLIDING_ATTENTION else max(lengths) + 1
        )
        first = max(0, min(lengths) - window + 1)
        keys, values = self.target.shared_kv(layer_type, rows, first)
        ends = send(torch.tensor(lengths), weight.device)[:, None]
        slots = torch.arange(first, max(lengths), device=weight.device)
        visible = (slots < ends) & (slots > ends - window)
        same_length = min(lengths) == max(lengths)  # `first` is the first that any sees
        return AssistantLayerInputs(
            rotary=self.network.rotary(weight, ends, layer_type),
            mask=None if same_length else visible[:, None, None],
            keys=(keys.to(weight.dtype), values.to(weight.dtype)),
        )

    @torch.inference_mode()
    def step(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return `Assistant`'s logits and states for the rows that were taken."""
        dtype = self.network.lm_head.weight.dtype
        return self.network(embedded.to(dtype), states.to(dtype), self._layer_inputs)


def _shared_kv_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    return stacked_attention(None, query, key, value, attention_mask, given["scaling"]), None


AttentionInterface.register("lent_keys", _shared_kv_attention)
