"""A copy of the target in a long sequence: it attends to the first and the last positions only."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import tiny
from foretoken.models.native import passes
from foretoken.models.native.conversion import NativeConversion
from foretoken.models.native.model import NativeModel, NativeTargetCopy
from foretoken.models.native.pages import PAGE_POSITIONS
from hybrids import hybrid
from tiny_families import MIXED, ROPE

pytestmark = [pytest.mark.cpu_only, pytest.mark.native]
BLOCK, LENGTH = 128, 700
SEQUENCE = [(7 * i * i + 3 * i) % 60 + 3 for i in range(LENGTH)]
DRAFT = [5, 6, 7]
LATENT = ROPE | {"hidden_size": 48, "num_key_value_heads": 4, "kv_lora_rank": 40}
LATENT |= {"qk_nope_head_dim": 32, "qk_rope_head_dim": 16, "v_head_dim": 24, "q_lora_rank": 36}
LATENT |= {"first_k_dense_replace": 2}
LENT = ROPE | {"num_hidden_layers": 4, "head_dim": 24, "num_kv_shared_layers": 2}
LENT |= {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 64, "sliding_window": 20}
LENT["layer_types"] = ["sliding_attention", "full_attention"] * 2
NETWORKS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "Llama": ("LlamaForCausalLM", "LlamaConfig", ROPE),
    "windows": ("Gemma2ForCausalLM", "Gemma2Config", MIXED),
    "ALiBi": ("BloomForCausalLM", "BloomConfig", ROPE | {"n_head": 4, "n_layer": 2}),
    "latents": ("DeepseekV3ForCausalLM", "DeepseekV3Config", LATENT),
    "borrowed keys and values": ("Gemma4ForCausalLM", "Gemma4TextConfig", LENT),
}


def build(name: str) -> Any:
    if name == "recurrences":
        return copy.deepcopy(hybrid("Qwen3_5ForCausalLM")).float()
    kind, config, settings = NETWORKS[name]
    torch.manual_seed(0)
    settings = settings | {"max_position_embeddings": 1024}
    return getattr(transformers, kind)(getattr(transformers, config)(**settings)).eval()


def make_pair(
    network: Any, monkeypatch: pytest.MonkeyPatch
) -> tuple[NativeModel, NativeTargetCopy]:
    monkeypatch.setattr(passes, "MIN_LAST_BLOCKS", 1)
    monkeypatch.setattr(passes, "MAX_LAST_BLOCKS_SHARE", 0.0)
    conversion = NativeConversion(None, "float32", lambda: network)
    target = conversion.load_model()
    return target, conversion.build_target_copy(target)


def score(model: NativeModel | NativeTargetCopy, length: int) -> np.ndarray:
    """The logits of draft tokens after a sequence of that length, which are then taken back."""
    logits = model.score([DRAFT], [len(DRAFT)])[0].numpy().copy()
    model.set_lengths([length])
    return logits


@pytest.mark.parametrize("name", [*NETWORKS, "recurrences"])
def test_a_copy_attends_to_the_first_and_the_last_blocks(name, monkeypatch):
    target, own = make_pair(build(name), monkeypatch)
    assert own.max_attended_tokens == 2 * BLOCK
    target.start([SEQUENCE])
    own.start([SEQUENCE])
    first = score(own, LENGTH)
    after = LENGTH // BLOCK * BLOCK
    (seq,) = target.seqs

    def spoil(begin: int, end: int) -> None:
        for page in seq.pages[begin // PAGE_POSITIONS : end // PAGE_POSITIONS]:
            page.numbers[:] = np.nan

    spoil(BLOCK, after)
    again = score(own, LENGTH)
    assert np.isfinite(first).all() and (again.view(np.int32) == first.view(np.int32)).all()
    assert np.isnan(score(target, LENGTH)).any()
    kept = [page.numbers.copy() for page in seq.pages]
    for begin, end in ((0, BLOCK), (after, after + PAGE_POSITIONS)):
        spoil(begin, end)
        assert np.isnan(score(own, LENGTH)).any()
        for page, numbers in zip(seq.pages, kept, strict=True):
            page.numbers[:] = numbers


@pytest.mark.parametrize("name", ["Llama", "windows"])
def test_a_copy_attends_to_all_tokens_of_a_shorter_sequence(name, monkeypatch):
    target, own = make_pair(build(name), monkeypatch)
    for length, same in ((2 * BLOCK - len(DRAFT), True), (3 * BLOCK - len(DRAFT), False)):
        target.permute([])
        own.permute([])
        target.start([SEQUENCE[:length]])
        own.start([SEQUENCE[:length]])
        drafted, scored = score(own, length), score(target, length)
        assert (drafted.view(np.int32) == scored.view(np.int32)).all() == same


def test_more_positions_where_weights_take_more_time(monkeypatch):
    monkeypatch.setattr(passes, "MIN_LAST_BLOCKS", 1)
    network = tiny.llama(64, 4096, hidden_size=512, intermediate_size=2048)
    conversion = NativeConversion(None, "float32", lambda: network)
    own = conversion.build_target_copy(conversion.load_model())
    config: Any = network.config
    kv = 2 * 4 * config.num_key_value_heads * -(-config.head_dim // 16) * 16
    kv *= config.num_hidden_layers
    share = passes.MAX_LAST_BLOCKS_SHARE * own.passes.bytes[1] / kv
    assert own.max_attended_tokens is not None and share > 2 * BLOCK
    assert 0 <= share + BLOCK - own.max_attended_tokens < BLOCK
