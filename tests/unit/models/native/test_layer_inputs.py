"""Networks whose layers read inputs of their own, and keys and values of other layers (Gemma 4's):
passes are the same to the bit on every instruction set, however sequences are cut."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Gemma4ForCausalLM, Gemma4TextConfig, PreTrainedModel

import foretoken
from foretoken.errors import RefusedError
from foretoken.kernels import library
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.reading import NetworkReader
from native_passes import piecewise, require_same_bits, stirred

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]
SEQUENCE = [(7 * i * i + 3 * i) % 60 + 3 for i in range(150)]  # behind a block of attention's
KINDS = ["sliding_attention", "full_attention", *["sliding_attention"] * 3, "full_attention"]


def made() -> PreTrainedModel:
    """Its last three layers read keys and values of the second and third, and have MLPs twice as
    wide."""
    config = Gemma4TextConfig(
        vocab_size=64, hidden_size=48, intermediate_size=40, num_hidden_layers=6, head_dim=24,
        num_attention_heads=4, num_key_value_heads=2, hidden_size_per_layer_input=16,
        vocab_size_per_layer_input=64, num_kv_shared_layers=3, use_double_wide_mlp=True,
        sliding_window=20, layer_types=KINDS, pad_token_id=0, eos_token_id=1, bos_token_id=2,
        per_layer_config={"1": {"head_dim": 32}, "5": {"head_dim": 32}},
    )  # fmt: skip
    return stirred(Gemma4ForCausalLM, config)


@pytest.mark.prove
def test_passes_are_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    network = made()
    lenders = [layer.attention.lender for layer in NetworkReader(network).decoder().layers]
    assert lenders == [None, None, None, 2, 2, 1]
    require_same_bits(network, SEQUENCE, monkeypatch)


def test_passes_are_transformers_own() -> None:
    """Within 1e-4 of the spread of logits in float32; the larger part is other orders of sums."""
    network = made()
    logits = piecewise(NativeConversion(None, "float32", lambda: network).model(), SEQUENCE, (1, 7))
    with torch.inference_mode():
        expected = network.double()(torch.tensor([SEQUENCE])).logits[0, 1:].numpy()
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


@pytest.mark.daily("int4")
@pytest.mark.parametrize("dtype", ["int8", "int4"])
def test_integers_give_the_same_bits(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    network, found = made(), list[Any]()
    for instructions in library.instruction_sets():
        monkeypatch.setenv(library.CHOICE, instructions)
        for sizes in (1,), (2, 30):
            found.append(
                piecewise(NativeConversion(None, dtype, lambda: network).model(), SEQUENCE, sizes)
            )
    assert all(np.array_equal(one, found[0]) for one in found)


def test_copies_of_layers_need_those_whose_keys_they_read() -> None:
    network = made()
    target: Any = NativeConversion(None, "float32", lambda: network).model()
    with pytest.raises(RefusedError, match="layer 2 is left out, whose keys"):
        NativeConversion(None, "float32", lambda: network, some=(0, 3)).companion(target)
    spec = foretoken.load(network, "self:0,1,2,3", runtime="native")
    (plain,), (drafted,) = (
        spec.generate([SEQUENCE[:40]], max_new_tokens=30, gamma=gamma, ignore_eos=True)
        for gamma in (0, 3)
    )
    assert plain.tokens == drafted.tokens
    assert drafted.stats.drafted
