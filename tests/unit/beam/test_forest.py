"""Texts that share their beginnings, in a tree and in a model's cache: every family scores a
tree's texts as it scores them alone."""

from __future__ import annotations

import pytest
import torch

from foretoken.beam.detours import Detours, forest
from foretoken.beam.forest import Copied, Forest, Node, Shared, closure
from foretoken.models.base import TreeModel
from foretoken.models.families import FAMILIES, build
from foretoken.models.stock import attention
from foretoken.models.stock.selfcheck import deviation, on_torch, stir
from oracle import random_model
from table import TableModel


def test_a_text_is_one_node() -> None:
    root = Node(7)
    text = root.child(1).child(2)
    assert root.child(1).child(2) is text and root.child(2) is not text
    assert text.new_tokens == [1, 2] and root.new_tokens == []
    assert [node.depth for node in text.upwards()] == [2, 1, 0]


def test_a_closure_has_parents_first_and_stops_at_what_is_known() -> None:
    root = Node(7)
    a, b = root.child(1).child(2), root.child(1).child(3)
    assert closure([a, b, a]) == [root, root.child(1), a, b]
    assert closure([a, b], known=[root, root.child(1)]) == [a, b]
    assert closure([b], known=[b]) == []


V = 4
DISTRIBUTION = random_model(3, V)


def logits(text: list[int]) -> torch.Tensor:
    return torch.log(torch.tensor(DISTRIBUTION(tuple(text)), dtype=torch.float64))


@pytest.mark.parametrize("form", [Shared, Copied])
def test_every_node_has_the_logits_of_its_text(form) -> None:
    forest = Forest(form(TableModel(DISTRIBUTION, V)))
    forest.start([[1, 2], []], None)
    roots = [Node(3), Node(0)]
    a, b = roots[0].child(1), roots[0].child(2)
    assert forest.score([[a, b], [roots[1]]]) == [True, True]
    torch.testing.assert_close(
        forest.gathered(0, [a, b]), torch.stack([logits([1, 2, 3, 1]), logits([1, 2, 3, 2])])
    )
    torch.testing.assert_close(forest.gathered(1, [roots[1]])[0], logits([0]))

    forest.keep([[b], [roots[1]]])
    longer = b.child(0)
    assert forest.score([[longer], []]) == [True, False]
    torch.testing.assert_close(forest.gathered(0, [longer])[0], logits([1, 2, 3, 2, 0]))
    assert forest.scored == [4, 1]  # the root and three more, each once

    forest.leave([0])
    assert forest.score([[roots[1].child(2)]]) == [True]
    torch.testing.assert_close(forest.gathered(0, [roots[1].child(2)])[0], logits([0, 2]))
    forest.clear()
    assert forest.branches.model._texts == []


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

    def by_slot(self, width, tree=None, counts=None):
        prepare(self, width, tree, counts)
        if tree is not None:
            self.positions = self.slots

    monkeypatch.setattr(attention.RaggedCache, "prepare", by_slot)
    assert detoured(name) > 1e-2


def test_negative_control_without_the_tree_mask(monkeypatch) -> None:
    prepare = attention.RaggedCache.prepare

    def all_seen(self, width, tree=None, counts=None):
        prepare(self, width, tree, counts)
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
