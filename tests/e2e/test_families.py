"""Models of several families over the ragged cache, side by side, and transformers' own around it.

That every class equals its own `generate`: `tests/unit/loading/test_every_family.py`.
"""

from __future__ import annotations

import random

import pytest
import torch
from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.selfcheck import CheckedSequences
from foretoken.models.stock.small_copy import randomize_weights
from tiny_families import build


def stirred(name: str) -> PreTrainedModel:
    torch.manual_seed(0)
    model = build(name).double()
    randomize_weights(model)
    return model


@pytest.mark.parametrize("name", ["Gemma 2", "BART"])
def test_the_model_stays_stock(name: str) -> None:
    """generate() in between our calls, and afterwards, is what it was before."""
    model = stirred(name).eval()
    ids = torch.tensor([[5, 6, 7, 8, 9], [9, 8, 7, 6, 5]])
    settings = {"do_sample": False, "max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": None}
    settings["attention_mask"] = torch.ones_like(ids)
    before, stock = model.generate(ids, **settings), model.config._attn_implementation
    rows = CheckedSequences(model, random.Random(3))
    rows.start([4, 9])
    for _ in range(3):
        rows.score(4)
        assert torch.equal(model.generate(ids, **settings), before)
    assert rows.max_delta < 1e-6
    assert model.config._attn_implementation == stock
    assert not any(module._forward_hooks for module in model.modules())


def test_an_error_in_a_forward_leaves_the_model_stock_and_the_rows_right() -> None:
    model = stirred("BART")
    rows = CheckedSequences(model, random.Random(4))
    rows.start([4, 9])
    stock = model.config._attn_implementation
    with pytest.raises(IndexError):
        rows.runner.score([[1], [99]], [1, 1])  # there is no token 99
    assert model.config._attn_implementation == stock
    assert not any(module._forward_hooks for module in model.modules())
    rows.score(5)
    assert rows.max_delta < 1e-9


def test_two_models_interleaved() -> None:
    pairs = [
        CheckedSequences(stirred(name), random.Random(i))
        for i, name in enumerate(["Mistral", "T5"])
    ]
    pairs += [
        CheckedSequences(pairs[0].model, random.Random(7)),
        CheckedSequences(stirred("BART"), random.Random(8)),
    ]
    for rows, lengths in zip(pairs, ([3, 40], [5, 1, 0], [11, 2], [9, 4]), strict=True):
        rows.start(lengths)
    for width in (4, 1, 9):
        for rows in pairs:
            rows.score(width)
    assert max(rows.max_delta for rows in pairs) < 1e-6


def test_the_wrong_class_is_refused() -> None:
    with pytest.raises(RefusedError, match="has an encoder"):
        CausalModel(build("T5"))
    with pytest.raises(RefusedError, match="no encoder"):
        Seq2SeqModel(build("Llama"))
