"""A stack of layers for multi-token prediction (MTP, arXiv 2412.19437), on torch.

Layer k makes draft token k. Its pair i consists of token i + k + 1 and a hidden state: the target's
at position i for layer 0, and layer k - 1's output for its pair i for later layers. transformers'
MtpModel defines a stack in the same way.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor
from transformers.modeling_outputs import CausalLMOutputWithPast

from foretoken.models.stock.cache import RaggedCache
from foretoken.models.stock.pairs import PairsNetwork, StockPairModel


class MtpStackNetwork(PairsNetwork):
    """A stack of transformers' MtpLayers with one output layer. Its inputs are embeddings for some
    consecutive layers, followed by the hidden state for the first of these layers."""

    @property
    def num_layers(self) -> int:
        return 1 + len(self.more)

    @property
    def input_width(self) -> int:
        """The size of an input of all layers."""
        return self.num_layers * self.width + self.config.get_text_config().hidden_size

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
        return_dict: bool = True,
        layers: range = range(0),
    ) -> CausalLMOutputWithPast:
        """Run these layers. The logits are those of the last one."""
        stack, cache = [self.first, *self.more], past_key_values
        *embeddings, states = inputs_embeds.split(self.width, -1)  # a state has the same size
        for k, embedded in zip(layers, embeddings, strict=True):
            kind = self.layer_types[k]
            layer_kwargs = self._make_layer_kwargs(kind, states, position_ids, cache)
            states = stack[k](embedded, states, **layer_kwargs)
        return CausalLMOutputWithPast(logits=cast(Any, self.head(states)))


class StockMtpStack(StockPairModel):
    """A stack of MTP layers on torch. All layers have the same positions in the cache."""

    def __init__(self, network: MtpStackNetwork) -> None:
        super().__init__(network)
        self.num_layers = network.num_layers
        self._layers = range(self.num_layers)

    def set_next_layers(self, layers: range) -> None:
        self._layers = layers

    def prefill(
        self, prompts: list[list[int]], sources: list[list[int]] | None = None
    ) -> RaggedCache:
        self._layers = range(self.num_layers)
        return super().prefill(prompts)

    def _make_inputs(self, ids: Tensor, cache: RaggedCache) -> dict[str, Any]:
        return super()._make_inputs(ids, cache) | {"layers": self._layers}
