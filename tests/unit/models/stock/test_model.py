"""Stock models over the ragged cache: how blocks are run, and what is refused."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from foretoken.models.stock import attention
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.selfcheck import CheckedSequences
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import FAMILIES, build

pytestmark = pytest.mark.daily


def network(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    model = build(name).double()
    randomize_weights(model)
    return model


def full(model: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def test_long_prompts_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.stock.model.PREFILL_CHUNK_TOKENS", 7)
    model = network("Mistral")
    rows = CheckedSequences(model, random.Random(1))
    widths: list[int] = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda _m, _i, out: widths.append(out.shape[1]))
    rows.start([40, 3, 20])
    assert max(widths) == 7
    rows.score(6)
    assert rows.max_delta < 1e-6


@pytest.mark.parametrize("name", ["Llama", "GPT-2", "T5", "BART", "Marian"])
def test_only_needed_positions_reach_the_output_layer(name: str) -> None:
    model = network(name)
    seen: list[int] = []
    model.get_output_embeddings().register_forward_hook(
        lambda _m, _i, out: seen.append(out.shape[1])
    )
    sources = [[3], [4, 5]] if model.config.is_encoder_decoder else None
    runner = (Seq2SeqModel if sources else CausalModel)(model)
    runner.start([[1, 2, 3], [4, 5]], sources)
    runner.score([[1, 2, 3, 4], [5, 6]], [1, 2])  # places 3 and 0, 1
    runner.score([[1, 2, 3, 4], [5, 6, 7, 8]], [2, 2])
    assert seen == [0, 2, 2]


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("name", ["T5", "BART"])
def test_a_decoder_may_be_deeper_or_shallower_than_its_encoder(name: str, layers: int) -> None:
    settings = {"num_decoder_layers": layers} if name == "T5" else {"decoder_layers": layers}
    config, kind, shape = FAMILIES[name]
    model = getattr(transformers, kind)(getattr(transformers, config)(**(shape | settings)))
    rows = CheckedSequences(model.double().eval(), random.Random(2))
    rows.start([4, 9])
    rows.score(5)
    rows.start([3])
    rows.score(3)
    assert rows.max_delta < 1e-6
    assert len(rows.runner.cache.self_attention_cache.list_parts()) == layers


def test_a_bias_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It and its sum with the mask are as wide as the context."""
    made: list[Tensor] = []
    additive = attention.to_additive_mask
    monkeypatch.setattr(
        attention, "to_additive_mask", lambda *args: made.append(args[1]) or additive(*args)
    )
    runner = Seq2SeqModel(network("T5"))
    runner.start([[1, 2, 3], [4, 5]], [[3], [4, 5]])
    runner.score([[1, 2], [5]], [1, 1])  # rows of 5 and 3
    made.clear()
    runner.score([[1, 2], [5, 6]], [1, 1])
    assert len(made) == 1
    runner.set_lengths([3, 3])
    made.clear()
    runner.score([[1, 2], [5, 6]], [1, 1])  # even rows
    assert len(made) == 1


def test_a_part_in_training_mode_is_evaluated_and_given_back() -> None:
    """A root in eval mode says nothing of what is below it."""
    model = network("GPT-2").eval()
    text = [5, 6, 7, 8]
    expected = full(model, text)
    part = model.transformer.h[0].train()
    runner = CausalModel(model)
    runner.start([[]])
    assert torch.allclose(runner.score([text], [4])[0], expected)
    assert part.training
    assert part.mlp.dropout.training
    assert not model.training


def test_blocks_are_padded_to_the_longest() -> None:
    runner = CausalModel(network("Llama"))
    runner.start([[1, 2], [3], [4]])
    runner.score([[5], [6, 7, 8], []], [1, 1, 0])
    assert runner.padding == 9 - 4
    runner.score([[5], [6], [7]], [1, 1, 1])
    assert runner.padding == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "T5"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    model = network(name).to(dtype)
    rows = CheckedSequences(model, random.Random(2))
    rows.start([9, 3])
    rows.score(4)
    rows.score(4)
    assert rows.max_delta < 60 * torch.finfo(dtype).eps * rows.spread
    assert rows.runner.score([[1], [2]], [1, 1]).dtype == dtype


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_arrays_stay_within_what_memory_says(name: str) -> None:
    """While rows join, grow, and all but one leave: of rows that are there, and slots."""
    model: Any = Seq2SeqModel(network(name)) if name == "T5" else CausalModel(network(name))
    sources = [[3] * 5, [4] * 90] if name == "T5" else None

    def taken() -> int:
        both = [model.cache.decoder, *([model.cache.cross] if name == "T5" else [])]
        return sum(c.slot_bytes * len(c.lengths) * c.capacity for c in both)

    def said() -> int:
        read = model.cache.cross.lengths if name == "T5" else []
        return model.compute_cache_bytes(model.lengths, read)

    model.start([[1] * 70, [2] * 3], sources)
    assert 0 < taken() <= said()
    for _ in range(5):
        model.score([[5] * 10, [6]], [1, 1])
        assert taken() <= said()
    model.leave([0])
    model.score([[7]], [1])
    assert taken() <= said() < model.compute_cache_bytes([70, 3], [5, 90] if sources else [])
