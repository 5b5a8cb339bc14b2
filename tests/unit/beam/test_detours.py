"""Trees in a cache row: every family scores a tree's texts as it scores them alone."""

from __future__ import annotations

import pytest
import torch

from foretoken.beam.detours import Detours, forest
from foretoken.beam.forest import Copied, Shared
from foretoken.models.base import TreeModel
from foretoken.models.families import FAMILIES, build
from foretoken.models.stock import attention
from foretoken.models.stock.selfcheck import deviation, on_torch, stir
from foretoken.models.table import TableModel

EXACT = {"GPT-2": 1e-9, "BART": 1e-9, "T5": 1e-6}  # float64; the others soften in float32


def detoured(name: str, double: bool = False) -> float:
    torch.manual_seed(0)
    model = build(name)
    model = model.double() if double else model
    stir(model)
    runner = on_torch(model)
    assert isinstance(runner, TreeModel)
    return deviation(model, Detours(runner))


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_grows_trees(name: str) -> None:
    assert detoured(name) < 1e-5


@pytest.mark.parametrize("name", EXACT)
def test_trees_are_exact_in_float64(name: str) -> None:
    assert detoured(name, double=True) < EXACT[name]


@pytest.mark.parametrize("name", ["Llama", "T5", "BART"])
def test_negative_control_without_the_trees_positions(name: str, monkeypatch) -> None:
    prepare = attention.RaggedCache.prepare

    def by_slot(self, width, tree=None):
        prepare(self, width, tree)
        if tree is not None:
            self.positions = self.slots

    monkeypatch.setattr(attention.RaggedCache, "prepare", by_slot)
    assert detoured(name) > 1e-2


def test_negative_control_without_the_tree_mask(monkeypatch) -> None:
    prepare = attention.RaggedCache.prepare

    def all_seen(self, width, tree=None):
        prepare(self, width, tree)
        if tree is not None:
            self.tree.seen.fill_(True)

    monkeypatch.setattr(attention.RaggedCache, "prepare", all_seen)
    assert detoured("Llama") > 1e-2


def test_a_family_whose_trees_are_wrong_gets_rows_instead(monkeypatch) -> None:
    model = on_torch(build("Qwen2"))
    assert isinstance(forest(model).branches, Shared)
    monkeypatch.setattr("foretoken.models.stock.selfcheck.FOUND", {})
    monkeypatch.setattr("foretoken.models.stock.selfcheck.remembered", lambda file: {})
    monkeypatch.setattr("foretoken.models.stock.selfcheck.remember", lambda *args: None)
    monkeypatch.setattr("foretoken.models.stock.selfcheck.TOLERANCE", 0.0)
    assert isinstance(forest(model).branches, Copied)


def test_a_model_without_trees_gets_rows() -> None:
    class Plain:
        def __init__(self, table: TableModel) -> None:
            self.start, self.score = table.start, table.score
            self.set_lengths, self.permute, self.leave = table.set_lengths, table.permute, 0

    table = TableModel.markov([[0.5, 0.5], [0.5, 0.5]])
    assert isinstance(forest(table).branches, Shared)
    assert isinstance(forest(Plain(table)).branches, Copied)
