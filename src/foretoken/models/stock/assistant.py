"""Gemma 4's assistants: draft models of a few small layers that attend to the target's KV cache and
have no KV cache of their own.

transformers 5.23 cannot build its own assistant class, since no layer computes keys for the other
layers to share. The layers, norms and rotary embeddings are transformers' modules.
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

from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Model
from foretoken.models.stock.attention import stacked_attention
from foretoken.transfer import send

SLIDING_ATTENTION = "sliding_attention"


class SharedKVConfig:
    """A config that makes transformers' layers use keys and values from the caller, instead of
    computing keys and values."""

    _attn_implementation = "lent_keys"
    hidden_size_per_layer_input = 0
    enable_moe_block = False

    def __init__(self, config: Any) -> None:
        self._config = config
        self.kv_sharing_modes = ["reuse"] * config.num_hidden_layers

    def __getattr__(self, name: str) -> Any:
        return getattr(self._config, name)

    def __deepcopy__(self, memo: dict[int, Any]) -> SharedKVConfig:
        return self  # it never changes


class AssistantLayerInputs(NamedTuple):
    """The inputs of all layers of one type, for one token after the end of each sequence."""

    rotary: tuple[Tensor, Tensor]
    mask: Tensor | None  # [B, 1, 1, K], True if the token attends to the key; None: to all keys
    keys: tuple[Tensor, Tensor]  # keys and values, each [B, heads, K, dim]


class CentroidHead(nn.Module):
    """An output layer that computes logits only for the tokens of the `top_k` centroids nearest to
    each hidden state; all other logits are -inf."""

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
    """The network of an assistant. Its modules have the same names as in the assistant's files.
    `config`: transformers' config. `kv_source_layers`: by layer type, the target's layer whose keys
    and values are used. Raises RefusedError if the installed transformers cannot build the
    layers."""

    def __init__(self, config: Any, kv_source_layers: dict[str, int]) -> None:
        super().__init__()
        self.config = config.get_text_config()
        text: Any = SharedKVConfig(self.config)
        self.kv_source_layers = kv_source_layers
        H, V, width = text.hidden_size, text.vocab_size, config.backbone_hidden_size
        self.layer_types, self.sliding_window = list(text.layer_types), int(text.sliding_window)
        layers = [Gemma4TextDecoderLayer(text, j) for j in range(text.num_hidden_layers)]
        if any(hasattr(layer.self_attn, "k_proj") for layer in layers):
            raise RefusedError(
                "this release of transformers cannot build the layers of Gemma 4's assistants; "
                "install transformers>=5.23"
            )
        norm = Gemma4RMSNorm(H, eps=text.rms_norm_eps)
        self.model = nn.ModuleDict({"layers": nn.ModuleList(layers), "norm": norm})
        with torch.device("cpu"):  # on the meta device its buffers would have no values
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
        """Return the next tokens' logits `[B, V]`, and the hidden states `[B, width]` for the next
        draft step.

        embedded: the embedding of each sequence's last token, `[B, width]`. states: the hidden
        states at the token before the last, `[B, width]`.
        """
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
    """An assistant that runs on torch over the target's sequences. It changes neither the sequences
    nor the KV cache."""

    runtime = "transformers"

    def __init__(self, network: Assistant, target: Model) -> None:
        self.network, self.target = network, target
        weight = network.lm_head.weight
        self.identity = f"assistant {len(network.layer_types)} {tuple(weight.shape)} {weight.dtype}"
        self._layer_inputs: dict[str, AssistantLayerInputs] = {}

    def with_target(self, target: Model) -> StockAssistant:
        """Return an assistant with the same network for another target. Raises InputError if that
        target does not share its keys and values."""
        if not target.capabilities.shared_kv:
            raise InputError(
                "the target does not share the keys and values that the draft needs; give a target "
                "that does"
            )
        return StockAssistant(self.network, target)

    @torch.inference_mode()
    def begin(self, rows: list[int]) -> None:
        """Prepare the next steps for these sequences of the target, at their present lengths."""
        kinds = dict.fromkeys(self.network.layer_types)
        self._layer_inputs = {kind: self._make_layer_inputs(kind, rows) for kind in kinds}

    def _make_layer_inputs(self, layer_type: str, rows: list[int]) -> AssistantLayerInputs:
        """Return the layer inputs for a token after the end of each of these sequences. The new
        token attends to the same keys as a token of the target at this position would, except that
        it has no key itself."""
        lengths, weight = [self.target.lengths[b] for b in rows], self.network.lm_head.weight
        window = (
            self.network.sliding_window if layer_type == SLIDING_ATTENTION else max(lengths) + 1
        )
        first = max(0, min(lengths) - window + 1)
        keys, values = self.target.get_shared_kv(layer_type, rows, first)
        ends = send(torch.tensor(lengths), weight.device)[:, None]
        slots = torch.arange(first, max(lengths), device=weight.device)
        visible = (slots < ends) & (slots > ends - window)
        # if True, every token attends to all keys from `first` on
        same_length = min(lengths) == max(lengths)
        return AssistantLayerInputs(
            rotary=self.network.rotary(weight, ends, layer_type),
            mask=None if same_length else visible[:, None, None],
            keys=(keys.to(weight.dtype), values.to(weight.dtype)),
        )

    @torch.inference_mode()
    def step(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and hidden states that the network computes for the sequences given to
        `begin`."""
        dtype = self.network.lm_head.weight.dtype
        return self.network(embedded.to(dtype), states.to(dtype), self._layer_inputs)


def _shared_kv_attention(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Any, **given: Any
) -> tuple[Tensor, None]:
    return stacked_attention(None, query, key, value, attention_mask, given["scaling"]), None


AttentionInterface.register("lent_keys", _shared_kv_attention)
