"""Some of a network's layers, over the same weights; the network itself stays as it is."""

from __future__ import annotations

import pytest
import torch

from foretoken.errors import RefusedError
from foretoken.models.openvino.thinned import stack_of, thinned
from tiny_families import build


@pytest.mark.parametrize("name", ["Mistral", "GPT-2", "Gemma 2", "T5", "BART"])
def test_layers_are_the_models_own(name: str) -> None:
    model = build(name)
    before = [id(part) for part in model.modules()]
    count = len(stack_of(model))
    thin = thinned(model, (0,))
    assert len(stack_of(model)) == count and [id(part) for part in model.modules()] == before
    ids = torch.tensor([[3, 4, 5]])
    feed = {"input_ids": ids} | ({"decoder_input_ids": ids} if name in ("T5", "BART") else {})
    with torch.no_grad():
        few, all_ = thin(**feed).logits, model(**feed).logits
    assert few.shape == all_.shape and not torch.allclose(few, all_)
    own = {weight.data_ptr() for weight in model.parameters()}
    assert {weight.data_ptr() for weight in thin.parameters()} < own


def test_all_layers_are_the_model() -> None:
    model = build("Gemma 2")
    ids = torch.tensor([[3, 4, 5]])
    with torch.no_grad():
        same = thinned(model, tuple(range(len(stack_of(model)))))(input_ids=ids).logits
        assert torch.equal(same, model(input_ids=ids).logits)


def test_positions_are_not_left_behind() -> None:
    """T5's first layer makes the bias by distance that all others add."""
    with pytest.raises(RefusedError, match="give layers that begin with 0"):
        thinned(build("T5"), (1,))
