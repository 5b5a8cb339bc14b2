"""Nodes are texts: one for each, found from any other by way of what they share."""

from __future__ import annotations

from foretoken.beam.forest import Node, closure


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
