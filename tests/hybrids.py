"""Tiny random hybrids in float64, whose greedy texts vary, and what is due of them."""

from __future__ import annotations

import copy
from functools import cache
from itertools import count
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

import pairs
from census import build
from foretoken.models.stock.small_copy import randomize_weights

LAYERS = ["conv", "full_attention", "conv"]
# Without experts, whose grouped product knows no float64, and smaller
SMALL: dict[str, dict[str, Any]] = {
    "Qwen3_5ForCausalLM": {"linear_key_head_dim": 16, "linear_value_head_dim": 8},
    "GraniteMoeHybridForCausalLM": {"num_local_experts": 0, "shared_intermediate_size": 48},
    "Lfm2ForCausalLM": {"num_hidden_layers": 3, "layer_types": LAYERS, "hidden_size": 32},
    "FalconH1ForCausalLM": {},
    "KimiLinearForCausalLM": {"mlp_layer_types": ["dense"] * 3, "linear_head_dim": 16},
}
FAMILIES = [*SMALL]
# Settings of other families that `random` makes
OTHERS: dict[str, dict[str, Any]] = {
    "FalconMambaForCausalLM": {"hidden_size": 32, "intermediate_size": 64, "state_size": 8},
    "MambaForCausalLM": {"hidden_size": 32, "intermediate_size": 64, "state_size": 8},
    "RecurrentGemmaForCausalLM": {"lru_width": 64},
    "RwkvForCausalLM": {"intermediate_size": 256},
}
PROMPTS = [[5, 17, 33], [9], [3 + (7 * i * i + i) % 60 for i in range(70)], [60, 12, 7, 9, 44]]


def random(name: str, seed: int, V: int = 64) -> PreTrainedModel:
    """Without an end of sequence; each weight counts."""
    made: Any = build(name)
    config = copy.deepcopy(made.config)
    for key, value in (SMALL | OTHERS).get(name, {}).items():
        setattr(config, key, value)
    config.vocab_size, config.pad_token_id = V, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: Any = type(made)(config).double().eval()
        randomize_weights(model)
        with torch.no_grad():
            for part in model.modules():
                if isinstance(part, nn.Linear):
                    part.weight *= 1.5
        head = model.get_output_embeddings()
        head.weight = nn.Parameter(torch.randn_like(head.weight))
    model.generation_config.eos_token_id = model.generation_config.pad_token_id = None
    return model.requires_grad_(False)


@cache
def hybrid(name: str) -> PreTrainedModel:
    """The first whose greedy texts do not merely repeat themselves."""
    return next(model for seed in count() if _varied(model := random(name, seed)))


@cache
def draft(name: str) -> PreTrainedModel:
    """One that guesses right at times."""
    return pairs.relative(hybrid(name), 0.05)


def _varied(model: PreTrainedModel) -> bool:
    return all(len(set(greedy(model, tuple(p), 150)[75:])) > 9 for p in PROMPTS[:2])


@cache
def greedy(model: PreTrainedModel, prompt: tuple[int, ...], limit: int) -> list[int]:
    """New tokens of transformers' own greedy decoding."""
    return pairs.stock(model, [*prompt], limit)


@cache
def margin(model: PreTrainedModel, prompt: tuple[int, ...], limit: int) -> float:
    """How far the likeliest token is ahead of the next one in the greedy text, at least, by one
    full forward, as a share of the spread of the logits."""
    text = greedy(model, prompt, limit)
    logits = pairs.scores(model, [*prompt, *text])[len(prompt) - 1 : -1]
    best, second = logits.topk(2).values.unbind(1)
    return float(((best - second) / logits.std(1)).min())
