"""Texts that share their beginnings, in a tree and in a model's cache."""

from __future__ import annotations

import pytest
import torch

from foretoken.beam.forest import Copied, Forest, Node, Shared, closure
from foretoken.models.table import TableModel
from oracle import random_model


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
