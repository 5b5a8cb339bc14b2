"""Tiny random Gemma 4 targets and assistants for them, and transformers' own assistant."""

from __future__ import annotations

import copy
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    Gemma4AssistantConfig,
    Gemma4AssistantForCausalLM,
    Gemma4ForCausalLM,
    Gemma4TextConfig,
    PreTrainedModel,
)

from foretoken.drafters.assistant import AssistantDrafter
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.native.assistant import NativeAssistant, PackedEmbedding
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel
from foretoken.models.stock.assistant import Assistant, StockAssistant
from foretoken.models.stock.assistant_files import build_assistant
from foretoken.models.stock.model import CausalModel
from foretoken.models.stock.sizes import find_last_kv_layers

WINDOW = 4
WIDTH = 24  # of the target's states


def text_config(V: int, **settings: Any) -> Gemma4TextConfig:
    kinds = ["sliding_attention", "full_attention"]
    sizes = {
        "vocab_size": V,
        "intermediate_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "global_head_dim": 8,
        "sliding_window": WINDOW,
        "pad_token_id": 0,
        "eos_token_id": None,
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 0,
    }
    return Gemma4TextConfig(
        **{**sizes, "layer_types": kinds * 2, "num_hidden_layers": 4, **settings}
    )


@cache
def target(V: int, *, sharing: bool = True, seed: int = 0, inputs: int = 8) -> Any:
    """In float64; sharing: whether its last layers read keys of others, and have inputs of their
    own, of this width (the native decoder takes multiples of 16)."""
    more: dict[str, Any] = {"hidden_size": WIDTH}
    if sharing:
        per_layer = {"hidden_size_per_layer_input": inputs, "vocab_size_per_layer_input": V}
        more |= {"num_kv_shared_layers": 2, **per_layer}
    model = _random(Gemma4ForCausalLM, text_config(V, **more), seed, 1.6)
    model.generation_config.eos_token_id = None
    return model


def _random(kind: Any, config: Any, seed: int, scale: float) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).double().eval()
        with torch.no_grad():
            for weight in model.parameters():
                if weight.ndim > 1:
                    weight.normal_(std=scale * weight.shape[-1] ** -0.5)
                else:
                    weight.uniform_(0.5, 1.5)
    return model.requires_grad_(False)


def assistant_config(V: int, *, ordered: bool) -> Gemma4AssistantConfig:
    return Gemma4AssistantConfig(
        text_config=text_config(V, hidden_size=16, num_kv_shared_layers=4),
        backbone_hidden_size=WIDTH,
        use_ordered_embeddings=ordered,
        num_centroids=V if V % 4 else 4,
        centroid_intermediate_top_k=2,
    )


def own_assistant(V: int, *, ordered: bool = False, seed: int = 1) -> Any:
    """transformers' own, whose configuration denies that all of its layers share."""
    with pytest.MonkeyPatch.context() as patch:
        reuse = property(lambda config: ["reuse"] * config.num_hidden_layers)
        patch.setattr(Gemma4TextConfig, "kv_sharing_modes", reuse)
        config = assistant_config(V, ordered=ordered)
        model: Any = _random(Gemma4AssistantForCausalLM, config, seed, 1.6)
    if ordered:
        order = torch.randperm(V, generator=torch.Generator().manual_seed(seed))
        model.masked_embedding.token_ordering = order
    return model


@cache
def network(V: int, *, ordered: bool = False, seed: int = 1) -> Assistant:
    own = own_assistant(V, ordered=ordered, seed=seed)
    return build_assistant(own.config, own.state_dict(), target(V).config, torch.float64)


def drafter(
    model: Any, assistant: Assistant, kind: type[AssistantDrafter] = AssistantDrafter
) -> AssistantDrafter:
    """A drafter upon that running target."""
    return kind(model, StockAssistant(assistant, model), model.model.get_input_embeddings())


def on_native(
    net: PreTrainedModel, assistant: Assistant, dtype: str = "float32"
) -> tuple[NativeModel, AssistantDrafter]:
    """The target and a drafter upon it, on the native decoder."""

    load: Any = partial(copy.deepcopy, net)
    model = NativeConversion(None, dtype, load, taps=(FINAL_TAP,)).load_model()
    own = copy.deepcopy(assistant).float()
    own.kv_source_layers = find_last_kv_layers(net.config)
    passes, facts = NativeConversion(None, dtype, lambda: own).load_passes()
    drafter = NativeAssistant(model, passes, facts, own)
    return model, AssistantDrafter(model, drafter, PackedEmbedding(model.passes))


def running(net: PreTrainedModel) -> CausalModel:
    model = CausalModel(net)
    model.tap((FINAL_TAP,))
    return model


@torch.inference_mode()
def last_state(net: Any, text: list[int]) -> Tensor:
    """The target's state at the last token, by a full forward."""
    out = net(input_ids=torch.tensor([text]), output_hidden_states=True, use_cache=False)
    return out.hidden_states[-1][0, -1]
