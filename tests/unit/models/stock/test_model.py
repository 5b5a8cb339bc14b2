"""Stock models over the ragged cache: how blocks are run, and what is refused."""

from __future__ import annotations

import random
from itertools import chain
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from foretoken.errors import InputError
from foretoken.models.stock import attention
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.selfcheck import CheckedRows
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import FAMILIES, build


def network(name: str, seed: int = 0) -> transformers.PreTrainedModel:
    torch.manual_seed(seed)
    model = build(name).double()
    randomize_weights(model)
    return model


def full(model: transformers.PreTrainedModel, ids: list[int]) -> Tensor:
    with torch.inference_mode():
        return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def test_long_prompts_run_in_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("foretoken.models.stock.model.CHUNK", 7)
    model = network("Mistral")
    rows = CheckedRows(model, random.Random(1))
    widths: list[int] = []
    embed = model.get_input_embeddings()
    embed.register_forward_hook(lambda _m, _i, out: widths.append(out.shape[1]))
    rows.start([40, 3, 20])
    assert max(widths) == 7
    rows.score(6)
    assert rows.worst < 1e-6


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
    rows = CheckedRows(model.double().eval(), random.Random(2))
    rows.start([4, 9])
    rows.score(5)
    rows.start([3])
    rows.score(3)
    assert rows.worst < 1e-6
    assert len(rows.runner.cache.self_attention_cache.parts()) == layers


@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_what_a_broken_text_left_harms_no_other(name: str, joins: bool) -> None:
    """NaN survives a mask. The place goes to a row that joins, or to the last one."""
    rows = CheckedRows(network(name), random.Random(3))
    rows.start([30, 9, 5])
    rows.score(4)
    cache = rows.runner.cache
    with torch.inference_mode():
        for part in {cache.decoder, getattr(cache, "cross", cache)}:
            for x in chain.from_iterable(layer.arrays for layer in part.filled()):
                x[part.places[0]] = torch.nan
    rows.leave([0])
    if joins:
        rows.start([2])
    for _ in range(3):
        rows.score(6)
    assert len(rows.texts) == 2 + joins and rows.worst < 1e-6


@pytest.mark.parametrize("name", ["Llama", "BART"])
def test_rows_change_places_repeat_and_leave_in_any_order(name: str) -> None:
    rows = CheckedRows(network(name), random.Random(5))
    rows.start([4, 0, 9, 1])
    rows.score(6)
    for order in ([3, 1, 0, 2], [2, 2, 0, 2, 1], [4, 0, 1, 1, 1, 3, 2], [5, 0]):
        rows.permute(order)
        rows.score(3)
        rows.start([2])
        rows.score(5)
    rows.leave([0, 2])
    rows.score(3)
    assert len(rows.texts) == 1 and rows.worst < 1e-6


def test_a_bias_is_made_once_for_all_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """It and its sum with the mask are as wide as the context."""
    made: list[Tensor] = []
    additive = attention.additive
    monkeypatch.setattr(
        attention, "additive", lambda *args: made.append(args[1]) or additive(*args)
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


@pytest.mark.parametrize("name", ["Llama", "T5"])
def test_nothing_to_run(name: str) -> None:
    model = network(name)
    runner = (Seq2SeqModel if name == "T5" else CausalModel)(model)
    runner.start([], [] if name == "T5" else None)
    runner.start([[1, 2], []], [[3], [4, 5]] if name == "T5" else None)
    assert runner.score([[], []], [0, 0]).shape == (2, 0, 64)
    assert runner.score([[7], []], [0, 0]).shape == (2, 0, 64)
    assert runner.score([[7], [8, 9]], [1, 2]).isfinite().all()
    runner.leave([0, 1])
    runner.start([[1]], [[3]] if name == "T5" else None)
    assert runner.score([[7]], [1]).shape == (1, 1, 64)


def test_padding_may_pass_the_context_but_tokens_may_not() -> None:
    """GPT-2 has no embedding for a position past its context, padding included."""
    model = network("GPT-2")
    runner = CausalModel(model)
    assert runner.context == 128
    long, short = [3] * 127, [5]
    runner.start([long, short])
    logits = runner.score([[7], [8, 9, 10]], [1, 3])
    assert torch.allclose(logits[0, 0], full(model, long + [7])[-1], atol=1e-9)
    assert torch.allclose(logits[1], full(model, short + [8, 9, 10])[-3:], atol=1e-9)
    with pytest.raises(InputError, match="row 0 would hold 129 tokens, the model 128"):
        runner.score([[7], []], [1, 0])


def test_lengths_only_go_back() -> None:
    runner = CausalModel(network("Llama"))
    runner.start([[1, 2], [3]])
    with pytest.raises(InputError, match="can only go back"):
        runner.set_lengths([2, 2])
    with pytest.raises(InputError, match="one per row"):
        runner.score([[1]], [1])


def test_blocks_are_padded_to_the_longest() -> None:
    runner = CausalModel(network("Llama"))
    runner.start([[1, 2], [3], [4]])
    runner.score([[5], [6, 7, 8], []], [1, 1, 0])
    assert runner.padding == 9 - 4
    runner.score([[5], [6], [7]], [1, 1, 1])
    assert runner.padding == 0


def test_sources_are_needed() -> None:
    runner = Seq2SeqModel(network("BART"))
    assert (runner.context, runner.source_context) == (128, 128)
    with pytest.raises(InputError, match="non-empty source"):
        runner.start([[2]])
    with pytest.raises(InputError, match="non-empty source"):
        runner.start([[2]], [[]])
    with pytest.raises(InputError, match="129 tokens, the encoder takes 128"):
        runner.start([[2]], [[5] * 129])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["Llama", "Gemma 2", "T5"])
def test_dtypes(name: str, dtype: torch.dtype) -> None:
    model = network(name).to(dtype)
    rows = CheckedRows(model, random.Random(2))
    rows.start([9, 3])
    rows.score(4)
    rows.score(4)
    assert rows.worst < 60 * torch.finfo(dtype).eps * rows.spread
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
        return model.memory(model.lengths, read)

    model.start([[1] * 70, [2] * 3], sources)
    assert 0 < taken() <= said()
    for _ in range(5):
        model.score([[5] * 10, [6]], [1, 1])
        assert taken() <= said()
    model.leave([0])
    model.score([[7]], [1])
    assert taken() <= said() < model.memory([70, 3], [5, 90] if sources else [])
