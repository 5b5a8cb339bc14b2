"""Drafters on hidden states: small decoders whose input at each position is a pair, the target's
hidden state at a token and the embedding of the next token.

These are EAGLE-3 (arXiv 2503.01840) and multi-token prediction layers (MTP, arXiv 2412.19437).
Attention, norms and experts are transformers' own modules. After the first draft token, the
drafter's own hidden state takes the place of the target's.
"""

from __future__ import annotations

import copy
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.modeling_outputs import CausalLMOutputWithPast

from foretoken.models.base import Blocks, HiddenStateDraftModel, count_block_tokens
from foretoken.models.stock.cache import RaggedCache
from foretoken.models.stock.model import CausalModel, StockModel


class TapProjection(nn.Module):
    """Projects the hidden states at several taps of the target to one hidden state. If there are
    norms, they are applied first."""

    def __init__(self, fc: nn.Linear, norms: nn.ModuleList) -> None:
        super().__init__()
        self.fc, self.norms = fc, norms

    def forward(self, states: Tensor) -> Tensor:
        """Return `[N, H]` for hidden states `[N, taps * H]`."""
        if len(self.norms):
            parts = states.chunk(len(self.norms), -1)
            states = torch.cat([norm(x) for norm, x in zip(self.norms, parts, strict=True)], -1)
        return self.fc(states)


class EagleLayer(nn.Module):
    """EAGLE-3's first layer. Its attention takes the concatenation of embedding and hidden state.

    layer: A layer of the draft model's family, whose modules are used.
    width, hidden: The sizes of an embedding and of a hidden state.
    norm_before_residual: True if the residual is the hidden state after its norm.
    """

    def __init__(self, layer: Any, width: int, hidden: int, *, norm_before_residual: bool) -> None:
        super().__init__()
        self.self_attn, self.mlp = layer.self_attn, layer.mlp
        self.input_layernorm = layer.input_layernorm
        self.hidden_norm = copy.deepcopy(layer.input_layernorm)
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.norm_before_residual = norm_before_residual
        for name in ("q_proj", "k_proj", "v_proj"):
            old = getattr(self.self_attn, name)
            wide = nn.Linear(width + hidden, old.out_features, bias=old.bias is not None)
            setattr(self.self_attn, name, wide)

    def forward(self, embedded: Tensor, states: Tensor, **given: Any) -> Tensor:
        normed = self.hidden_norm(states)
        both = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, _ = self.self_attn(hidden_states=both, **given)
        states = (normed if self.norm_before_residual else states) + attended
        return states + self.mlp(self.post_attention_layernorm(states))


class NormedHead(nn.Module):
    """A norm followed by an output layer. The hidden states before the norm are also the hidden
    states of the next draft step."""

    def __init__(self, norm: nn.Module, linear: nn.Linear) -> None:
        super().__init__()
        self.norm, self.linear, self.out_features = norm, linear, linear.out_features

    def forward(self, states: Tensor) -> Tensor:
        return self.linear(self.norm(states))


class PairsNetwork(PreTrainedModel):
    """A decoder whose `inputs_embeds` are embeddings of size `width`, each followed by a hidden
    state.

    first: The first layer (EagleLayer or transformers' MtpLayer), over embeddings and states.
    more: Further layers of the draft model's family.
    head: The output layer. Its input is also used as the hidden states of the next draft step. A
        copy for the native decoder may have none.
    join: The projection of the target's hidden states at the taps; None: there is only one tap.
    norm: A norm before `head`; None: there is none.
    """

    main_input_name = "inputs_embeds"
    _supports_sdpa = True

    def __init__(
        self,
        config: PreTrainedConfig,
        width: int,
        first: nn.Module,
        more: list[nn.Module],
        rotary: nn.Module | None,
        head: nn.Module,
        join: TapProjection | None = None,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__(config)
        self.width, self.first, self.more, self.rotary = width, first, nn.ModuleList(more), rotary
        self.norm, self.head, self.join = norm, head, join
        text: Any = config.get_text_config(decoder=True)
        full = ["full_attention"] * (1 + len(more))
        self.layer_types: list[str] = getattr(text, "layer_types", None) or full
        rope = getattr(text, "rope_parameters", None) or {}
        self.rope_by_layer_type = bool(text.nested_rope_parameter_keys(rope))

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return True  # otherwise transformers would search this file for experts

    @property
    def input_width(self) -> int:
        """The size of an input: of an embedding and a hidden state together."""
        return self.width + self.config.get_text_config().hidden_size

    def get_output_embeddings(self) -> nn.Module:
        return self.head

    def forward(
        self,
        inputs_embeds: Tensor,
        position_ids: Tensor,
        past_key_values: Any = None,
        use_cache: bool = True,
        return_dict: bool = True,
    ) -> CausalLMOutputWithPast:
        embedded, states = inputs_embeds[..., : self.width], inputs_embeds[..., self.width :]
        layer_kwargs = {
            kind: self._make_layer_kwargs(kind, states, position_ids, past_key_values)
            for kind in {*self.layer_types}
        }
        states = self.run_layers(embedded, states, layer_kwargs)
        return CausalLMOutputWithPast(logits=cast(Any, self.head(states)))

    def run_layers(
        self, embedded: Tensor, states: Tensor, layer_kwargs: dict[str, dict[str, Any]]
    ) -> Tensor:
        """Return the hidden states for the output layer. layer_kwargs: by layer type, the arguments
        of a layer in addition to its inputs."""
        for kind, layer in zip(self.layer_types, [self.first, *self.more], strict=True):
            inputs = (embedded, states) if layer is self.first else (states,)
            states = layer(*inputs, **layer_kwargs[kind])
        return states if self.norm is None else self.norm(states)

    def _make_layer_kwargs(
        self, layer_type: str, states: Tensor, positions: Tensor, cache: Any
    ) -> dict[str, Any]:
        """Return the arguments for layers of one type in addition to their inputs: mask, positions,
        cache and rotary embeddings."""
        mask: Any = LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[layer_type]
        mask = mask(
            config=self.config,
            inputs_embeds=states,
            attention_mask=None,
            past_key_values=cache,
            position_ids=positions,
        )
        layer_kwargs = {"attention_mask": mask, "position_ids": positions, "past_key_values": cache}
        if self.rotary is not None:
            own = {"layer_type": layer_type} if self.rope_by_layer_type else {}
            layer_kwargs["position_embeddings"] = self.rotary(states, position_ids=positions, **own)
        return layer_kwargs


class StockPairModel(CausalModel, HiddenStateDraftModel):
    """A drafter on hidden states that runs on torch. Before each `score`, `set_next_pairs` sets the
    pairs for the tokens of the blocks."""

    def __init__(self, network: PairsNetwork) -> None:
        StockModel.__init__(self, network)
        self.takes_positions = True
        self.capabilities = CausalModel.capabilities
        weights = sum(weight.numel() for weight in network.parameters())
        self.identity = f"pairs of {weights} {network.config.to_json_string()} {self.compute_dtype}"
        self._pairs: list[Tensor] = []

    def project_states(self, states: Tensor) -> Tensor:
        """Return the target's hidden states at the taps, `[N, W]`, projected to `[N, H]`."""
        join = cast(PairsNetwork, self.model).join
        return states if join is None else join(states.to(self.model.dtype))

    def set_next_pairs(self, pairs: Tensor, counts: list[int]) -> None:
        """Set the pairs of the next `score`, `[sum(counts), width + H]`; the first counts[0] pairs
        belong to sequence 0."""
        self._pairs = list(pairs.to(self.model.dtype).split(counts))

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert len(self._pairs) == len(count_block_tokens(blocks, need))
        return super().score(blocks, need)

    def prefill(
        self, prompts: list[list[int]], sources: list[list[int]] | None = None
    ) -> RaggedCache:
        width = cast(PairsNetwork, self.model).input_width
        zeros = torch.zeros(max(map(len, prompts), default=0), width, dtype=self.model.dtype)
        zeros = zeros.to(self.device)
        self._pairs = [zeros[: len(p)] for p in prompts]
        return super().prefill(prompts)  # prompts are empty; for measurements, the pairs are zeros

    def _make_inputs(self, ids: Tensor, cache: RaggedCache) -> dict[str, Any]:
        pairs = pad_sequence(self._pairs, batch_first=True)
        return {"inputs_embeds": cache.to_slot_order(pairs), "position_ids": cache.positions}
