"""Texts that share a prompt, in a tree: a model scores each as it scores it alone."""

from __future__ import annotations

import pytest
import torch

from foretoken.models.stock.selfcheck import build_torch_model
from foretoken.models.stock.small_copy import randomize_weights
from oracle import random_model
from pairs import scores
from reproduction.beam.tree import Node, ScoredTree
from table import TableModel
from tiny_families import FAMILIES, build


def test_a_text_is_one_node() -> None:
    root = Node()
    text = root.child(1).child(2)
    assert root.child(1).child(2) is text and root.child(2) is not text
    assert text.new_tokens == [1, 2] and root.new_tokens == []
    assert [node.depth for node in text.upwards()] == [2, 1, 0]


V = 4
DISTRIBUTION = random_model(3, V)


def test_every_node_has_the_logits_of_its_text() -> None:
    tree, root = ScoredTree(TableModel(DISTRIBUTION, V), [1, 2, 3]), Node()
    a, b = root.child(1), root.child(2)

    def same(node: Node) -> None:
        expected = torch.tensor(DISTRIBUTION((1, 2, 3, *node.new_tokens)), dtype=torch.float64)
        torch.testing.assert_close(tree.logits[node], expected.log())

    tree.score([root, a, b])
    assert tree.logits.keys() == {root, a, b} and (tree.calls, tree.scored) == (1, 3)
    for node in (root, a, b):
        same(node)
    tree.score([b, b.child(0), b.child(0).child(3), a.child(3)])  # b is known
    assert tree.logits.keys() == {b, b.child(0), b.child(0).child(3), a.child(3)}
    assert (tree.calls, tree.scored) == (2, 6)
    for node in tree.logits:
        same(node)
    tree.score([b])
    assert tree.calls == 2 and tree.model._texts == []


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_scores_trees(name: str) -> None:
    torch.manual_seed(0)
    model = build(name)
    randomize_weights(model)
    encodes = model.config.is_encoder_decoder
    prompt, source = [5, 17, 33], [7, 9, 44, 31] if encodes else None
    tree, root = ScoredTree(build_torch_model(model), prompt, source), Node()
    deep = root.child(8).child(3).child(11).child(40)
    nodes = [*deep.upwards(), root.child(8).child(4), root.child(21)]
    for some in (nodes[2:], nodes):
        tree.score(some)
        for node in some:
            alone = scores(model, prompt + node.new_tokens, source)[-1]
            torch.testing.assert_close(tree.logits[node], alone, atol=1e-4, rtol=1e-4)
