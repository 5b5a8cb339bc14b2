"""Which networks can be spread over several processes, told before one is started."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from foretoken.errors import RefusedError
from foretoken.models.families import ROPE, build
from foretoken.models.parallel import sharding
from foretoken.models.parallel.sharding import key_heads, require_plan


@pytest.mark.parametrize("name", ["Llama", "Qwen3", "Mixtral", "GPT-NeoX", "Phi-3"])
def test_families_with_a_plan(name: str) -> None:
    with torch.device("meta"):
        require_plan(build(name), 2)


@pytest.mark.parametrize(
    ("name", "ranks", "says"),
    [
        ("GPT-2", 2, r"is 2, but gpt2 \(GPT2LMHeadModel\) has no tensor parallel plan"),
        ("OPT", 2, r"opt \(OPTForCausalLM\) has no tensor parallel plan"),
        ("T5", 2, r"t5 \(T5ForConditionalGeneration\) is an encoder-decoder"),
        ("Llama", 3, r"is 3, but llama .* has 2 key-value heads, .* give 1 or 2"),
        ("GPT-NeoX", 8, r"has 4 key-value heads, .* give 1 or 2 or 4"),
    ],
)
def test_what_cannot_be_spread_is_refused_by_name(name: str, ranks: int, says: str) -> None:
    with torch.device("meta"):
        network = build(name)
    with pytest.raises(RefusedError, match=says):
        require_plan(network, ranks)


def test_an_accelerator_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sharding.torch.accelerator, "is_available", lambda: True)
    with pytest.raises(RefusedError, match="CUDA_VISIBLE_DEVICES"):
        require_plan(build("Llama"), 2)


def test_key_heads() -> None:
    with torch.device("meta"):
        shared = LlamaForCausalLM(LlamaConfig(**ROPE | {"num_key_value_heads": 1}))
        assert key_heads(shared) == 1 and key_heads(build("GPT-NeoX")) == 4
