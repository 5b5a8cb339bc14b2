"""Families whose attention, or whose counting of positions, is their own code share a cache: rows
of ragged batches have their own logits, and what would count by the longest row is found by the
self-check."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from transformers import PreTrainedModel

from census import build as small
from foretoken.errors import RefusedError
from foretoken.models.stock import attention, positions
from foretoken.models.stock.positions import RowCausalTable, RowPositionEmbedding, RowQueryScale
from foretoken.models.stock.rowwise import RowwiseModel
from foretoken.models.stock.selfcheck import CheckedSequences, build_torch_model, check
from foretoken.models.stock.small_copy import randomize_weights

ENDS = {"eos_token_id": None, "bos_token_id": 1, "pad_token_id": 0}
SMALL = {"vocab_size": 64, "hidden_size": 32, **ENDS}
STACK: dict[str, Any] = SMALL | {"num_hidden_layers": 2, "num_attention_heads": 2}
ALIBI = STACK | {"alibi": True, "multi_query": False}
SHARED = {"new_decoder_architecture": True, "num_kv_heads": 1}
LOCAL = {"attention_types": [[["global", "local"], 1]], "window_size": 4, "num_layers": 2}
LLAMA4 = {"intermediate_size": 48, "intermediate_size_mlp": 48, "num_key_value_heads": 2}
LLAMA4 |= {"head_dim": 16, "num_local_experts": 2, "num_experts_per_tok": 1, "floor_scale": 4}
LLAMA4 |= {"attention_chunk_size": 8, "no_rope_layers": [1, 0], "attn_temperature_tuning": True}
SIDES: dict[str, Any] = {
    f"{side}_{what}": 2
    for side in ("encoder", "decoder")
    for what in ("layers", "attention_heads", "ffn_dim")
}
SIDES |= {"vocab_size": 64, "d_model": 32, "decoder_start_token_id": 2}
MPT = ENDS | {"vocab_size": 64, "d_model": 32, "n_layers": 2, "n_heads": 2}
# By class and what is special in it
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "BLOOM": ("BloomForCausalLM", SMALL | {"n_layer": 2, "n_head": 2}),
    "MPT": ("MptForCausalLM", MPT),
    "Falcon": ("FalconForCausalLM", STACK),
    "Falcon, ALiBi": ("FalconForCausalLM", ALIBI),
    "Falcon, new": ("FalconForCausalLM", STACK | SHARED),
    "GPT-J": ("GPTJForCausalLM", SMALL | {"n_layer": 2, "n_head": 2, "rotary_dim": 8}),
    "CodeGen": ("CodeGenForCausalLM", SMALL | {"n_layer": 2, "n_head": 4, "rotary_dim": 4}),
    "GPT-Neo": ("GPTNeoForCausalLM", SMALL | {"num_heads": 2} | LOCAL),
    "XGLM": (
        "XGLMForCausalLM",
        ENDS | {"vocab_size": 64, "d_model": 32, "num_layers": 2, "attention_heads": 2}
        | {"ffn_dim": 48},
    ),
    "Llama 4": ("Llama4ForCausalLM", STACK | LLAMA4),
    "M2M-100": ("M2M100ForConditionalGeneration", ENDS | SIDES | {"pad_token_id": 1}),
    "BART's decoder": ("BartForCausalLM", ENDS | SIDES),
}  # fmt: skip


def build(name: str, **changes: Any) -> PreTrainedModel:
    kind, settings = KINDS[name]
    cls = getattr(transformers, kind)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = cls(cls.config_class(**(settings | changes))).eval()
        randomize_weights(model)
    model.generation_config.forced_eos_token_id = None
    return model


@pytest.mark.daily("BLOOM", "GPT-J", "XGLM")
@pytest.mark.parametrize("name", KINDS)
def test_rows_are_exact(name: str) -> None:
    assert check(build(name)).delta < 1e-5


@pytest.mark.daily("M2M-100", "BART's decoder")
@pytest.mark.parametrize(
    "name", ["MPT", "GPT-J", "CodeGen", "GPT-Neo", "XGLM", "M2M-100", "BART's decoder"]
)
def test_padding_may_pass_the_end_of_the_context(name: str) -> None:
    length = "max_seq_len" if name == "MPT" else "max_position_embeddings"
    model = build(name, **{length: 24})
    rows = CheckedSequences(model, random.Random(0), build_torch_model(model))
    rows.start([22, 3])
    blocks = [rows.draw_tokens(2), rows.draw_tokens(5)]
    logits = rows.runner.score(blocks, [2, 5])
    rows.seqs = [text + block for text, block in zip(rows.seqs, blocks, strict=True)]
    for b, n in enumerate((2, 5)):
        rows.compare(logits[b, :n], rows.compute_reference(b, n))
    assert rows.max_delta < 1e-4


PLANTED: dict[str, tuple[str, Any, str, Callable[..., Any]]] = {
    "masks of another form": ("Falcon", attention, "has_own_attention", lambda part: False),
    "positions of the longest row": (
        "BART's decoder",
        RowPositionEmbedding,
        "forward",
        lambda self, *args, **kw: self.table(*args, **kw),
    ),
    "positions from the first token": (
        "M2M-100", positions, "counts_from_padding", lambda table: False
    ),
    "a window of the longest row": (
        "GPT-Neo", RowCausalTable, "__getitem__", lambda self, cut: self.table[cut]
    ),
    "no scale": ("Llama 4", RowQueryScale, "forward", lambda self, states: self.queries(states)),
}  # fmt: skip


@pytest.mark.parametrize("bug", PLANTED)
def test_planted_bugs_are_caught(bug: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, place, attribute, planted = PLANTED[bug]
    model = build(name)
    monkeypatch.setattr(place, attribute, planted)
    with pytest.raises(RefusedError, match=model.config.model_type):
        check(model)


def test_a_padding_id_within_a_text_is_read_as_generate_reads_it() -> None:
    """M2M100 counts behind it, and gives it no position."""
    model, text = build("M2M-100"), [2, 5, 1, 7, 1, 1, 9]
    rows = build_torch_model(model)
    rows.start([[], []], [[3, 4, 5], [6]])
    logits = rows.score([text, [2, 8]], [len(text), 2])
    alone = RowwiseModel(model)
    alone.start([[]], [[3, 4, 5]])
    stepwise = torch.cat([alone.score([[token]], [1])[0] for token in text])
    assert torch.allclose(logits[0], stepwise, atol=1e-5)


def test_attention_that_changes_with_what_is_read_at_once_shares_no_cache() -> None:
    model = small("BigBirdForCausalLM")
    with pytest.raises(RefusedError, match="depends on the block length; set"):
        check(model)
    model.config.attention_type = "original_full"
    assert check(model).delta < 1e-5


def test_code_that_takes_no_masks_shares_no_cache() -> None:
    """Layers made for flash attention read 2D masks."""
    model: Any = build("GPT-J")
    model.config._attn_implementation_internal = "flash_attention_2"
    with pytest.raises(RefusedError, match="no masks with flash_attention_2; set .* 'eager'"):
        check(model)


def test_an_id_of_a_picture_in_a_text_is_read_as_in_its_own_forward() -> None:
    """Gemma 4 has the padding's embedding there."""
    model: Any = small("Gemma4ForConditionalGeneration")
    model.config.image_token_id = 9
    rows, text = build_torch_model(model), [3, 9, 5, 9, 9, 7]
    rows.start([text[:2], [4]])
    logits = rows.score([text[2:], [5]], [4, 1])
    with torch.inference_mode():
        full: Tensor = model(input_ids=torch.tensor([text])).logits[0, 2:]
    assert torch.allclose(logits[0], full, atol=1e-4)
