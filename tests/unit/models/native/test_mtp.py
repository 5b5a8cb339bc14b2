"""MTP layers on the native decoder draw from what the same layers on torch compute in float64, read
anew for each draft token."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import census
import hybrids
import pairs
from foretoken import Speculator
from foretoken.drafters.pairs import PairsDrafter
from foretoken.models.hidden_states import FINAL_TAP
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeHiddenStateDraft, NativeMtpStack
from foretoken.models.stock.mtp_stacks import MtpStackNetwork
from foretoken.models.stock.pair_files import PairsDraft
from foretoken.models.stock.pairs import PairsNetwork
from pairdrafts import (
    filed,
    mtp_draft,
    mtp_layer,
    mtp_stack,
    noted,
    on_native,
    require_true,
    states_of,
    wide,
)

pytestmark = pytest.mark.native
PROMPTS = [[5, 17, 33], [60, 12, 7, 9, 44, 31, 2, 18, 50, 41, 23, 6], [3, 58]]
HOT: dict[str, Any] = {"max_new_tokens": 24, "gamma": 3, "temperature": 2.0, "seed": 1}
FAMILIES = [
    "Qwen3_5ForCausalLM",  # gated attention
    "Qwen3NextForCausalLM",  # with experts
    "Qwen3_5MoeForCausalLM",
    "DeepseekV3ForCausalLM",  # latents
    "Glm4MoeForCausalLM",
    "Ernie4_5_MoeForCausalLM",
    "Qwen2ForCausalLM",  # MiMo's layers
    "MistralForCausalLM",
    "ExaoneMoeForCausalLM",
]


def network_of(name: str) -> PreTrainedModel:
    if name in hybrids.FAMILIES:
        return copy.deepcopy(hybrids.random(name, 0)).float()
    made = census.build(name)
    return pairs.lively(type(made), made.config).float()


@dataclass
class TorchLaw:
    """The logits `[G, V]` of a draft's layers on torch, in float64: of a single layer for all draft
    tokens, or of layer k for draft token k."""

    network: PreTrainedModel
    layers: PairsNetwork

    @torch.no_grad()
    def __call__(self, text: list[int], guesses: list[int]) -> Tensor:
        states, tokens, made = states_of(self.network, text[:-1], (FINAL_TAP,)), text[1:], []
        states, stack = states.double(), isinstance(self.layers, MtpStackNetwork)
        embed: Any = self.network.get_input_embeddings()
        for k, guess in enumerate(guesses):
            inputs = torch.cat([embed(torch.tensor(tokens)).double(), states], -1)[None]
            places, seen = torch.arange(len(tokens))[None], list[Tensor]()
            hook = self.layers.head.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
            more = {"layers": range(k, k + 1)} if stack else {}
            logits: Any = self.layers(inputs, places, **more).logits
            hook.remove()
            made.append(logits[0, -1])
            states = seen[0][0] if stack else torch.cat([states, seen[0][0, -1:]])
            tokens = [*tokens[stack:], guess]
        return wide(torch.stack(made), None, len(embed.weight))


def law(network: PreTrainedModel, draft: PairsDraft) -> TorchLaw:
    layers = copy.deepcopy(draft.network).double()
    layers.set_experts_implementation("eager")  # the grouped product knows no float64
    return TorchLaw(network, layers)


def require_course(drafter: PairsDrafter, expected: Callable[..., Tensor]) -> None:
    """Sampled hot in a ragged batch, so that some draft tokens are kept and some are not."""
    notes = noted(drafter)
    found = Speculator(drafter.target, drafter).generate(PROMPTS, **HOT)
    kept, made = (sum(getattr(text.stats, n) for text in found) for n in ("accepted", "drafted"))
    assert 0 < kept < made
    require_true(notes, expected, 1e-4)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_layer_draws_from_its_law(name: str) -> None:
    network = network_of(name)
    draft = mtp_draft(network, filed(mtp_layer(network), "mtp"))
    drafter = on_native(network, draft)
    assert isinstance(drafter.decoder, NativeHiddenStateDraft)
    require_course(drafter, law(network, draft))


@pytest.mark.parametrize("count", [2, 3])
@pytest.mark.parametrize("name", ["DeepseekV3ForCausalLM", "Glm4MoeForCausalLM"])
def test_a_stack_draws_from_its_law(name: str, count: int) -> None:
    network = network_of(name)
    draft = mtp_draft(network, mtp_stack(network, count)[1])
    drafter = on_native(network, draft)
    assert isinstance(drafter.decoder, NativeMtpStack)
    require_course(drafter, law(network, draft))
