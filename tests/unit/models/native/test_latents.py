"""Attention by latents is the same to the bit on every instruction set, however sequences
are cut into passes; weights in integers give the same bits on all of them."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    MiniCPM3Config,
    MiniCPM3ForCausalLM,
    PreTrainedModel,
)

from foretoken.errors import RefusedError
from foretoken.kernels import library
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.reading import NetworkReader
from native_passes import piecewise, require_same_bits, stirred

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]
SEQUENCE = [(7 * i * i + 3 * i) % 60 + 3 for i in range(150)]  # behind a block of attention's
SIZES = {"vocab_size": 64, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 4, "kv_lora_rank": 40}
SIZES |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
WIDE = {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24}
NARROW = {"qk_nope_head_dim": 20, "qk_rope_head_dim": 8, "v_head_dim": 96}  # a result is wider
NETWORKS: dict[str, Any] = {
    "interleaved": (
        DeepseekV3ForCausalLM,
        DeepseekV3Config(**SIZES, **WIDE, q_lora_rank=36, first_k_dense_replace=2),
    ),
    "whole queries": (
        DeepseekV2ForCausalLM,
        DeepseekV2Config(**SIZES, **NARROW, q_lora_rank=None, first_k_dense_replace=2),
    ),
    "halves": (MiniCPM3ForCausalLM, MiniCPM3Config(**SIZES, **NARROW, q_lora_rank=32)),
}


def made(name: str) -> PreTrainedModel:
    return stirred(*NETWORKS[name])


@pytest.mark.prove
@pytest.mark.parametrize("name", NETWORKS)
def test_passes_are_the_same_bits(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    require_same_bits(made(name), SEQUENCE, monkeypatch)


@pytest.mark.parametrize("name", NETWORKS)
def test_passes_are_transformers_own(name: str) -> None:
    """Within 1e-4 of the spread of logits in float32; the larger part is other orders of sums."""
    network = made(name)
    with torch.inference_mode():
        expected = network.double()(torch.tensor([SEQUENCE])).logits[0, 1:].numpy()
    logits = piecewise(
        NativeConversion(None, "float32", lambda: network.float()).model(), SEQUENCE, (1, 7)
    )
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_give_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, found = made("interleaved"), list[Any]()
    for instructions in library.instruction_sets():
        monkeypatch.setenv(library.CHOICE, instructions)
        for sizes in (1,), (2, 30):
            found.append(
                piecewise(NativeConversion(None, dtype, lambda: network).model(), SEQUENCE, sizes)
            )
    assert all(np.array_equal(one, found[0]) for one in found)
    with torch.inference_mode():
        exact = network(torch.tensor([SEQUENCE])).logits[0, 1:].numpy()
    assert 0 < np.abs(found[0] - exact).max() < exact.std() * (0.1 if dtype == "int8" else 1.5)


def test_latents_with_a_part_that_is_not_known_are_refused() -> None:
    network = made("halves")
    network.model.layers[1].self_attn.kv_b_proj.bias = torch.nn.Parameter(torch.ones(464))
    with pytest.raises(RefusedError, match="keys of latents with a bias"):
        NetworkReader(network).decoder()
