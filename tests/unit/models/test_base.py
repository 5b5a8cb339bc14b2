"""What holds of models of every kind."""

from __future__ import annotations

import pytest
import torch

from foretoken import load
from foretoken.errors import InputError
from foretoken.models.base import count_block_tokens, require_model
from foretoken.models.graphs import GraphModel
from foretoken.models.stock.selfcheck import build_torch_model
from table import TableModel
from tiny_families import build

pytestmark = pytest.mark.daily

TABLE = TableModel(lambda text: [0.5, 0.5], 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", [build_torch_model, GraphModel])
def test_a_model_says_what_it_computes_in(form, dtype: torch.dtype) -> None:
    for name in ("Llama", "T5"):
        assert form(build(name).to(dtype)).compute_dtype == str(dtype).removeprefix("torch.")
    assert TABLE.compute_dtype == "float64"


def test_rows_gain_their_blocks() -> None:
    assert count_block_tokens([[1, 2], []], [1, 0]) == [2, 0]
    assert count_block_tokens(torch.zeros(2, 5), [3, 1]) == [3, 1]


def test_only_models_pass_for_models() -> None:
    require_model(TABLE)
    for value in (TableModel, load(build("Llama"), "none"), None, "a name"):
        with pytest.raises(InputError, match=r"is not a model; give a Speculator's target"):
            require_model(value)
