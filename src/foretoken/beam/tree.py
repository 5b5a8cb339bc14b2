"""Texts that share their beginnings: each is a node, and a node is its parent and one token.

Knows no models and no scores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator


class Node:
    """A text; the root is a prompt, which ends with the root's token.

    There is one node for each text below a root, so nodes are compared by identity.
    """

    __slots__ = ("_children", "depth", "parent", "token")

    def __init__(self, token: int, parent: Node | None = None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = parent.depth + 1 if parent else 0  # new tokens
        self._children: dict[int, Node] = {}

    def child(self, token: int) -> Node:
        """The text that is one token longer."""
        if token not in self._children:
            self._children[token] = Node(token, self)
        return self._children[token]

    @property
    def new_tokens(self) -> list[int]:
        """The tokens behind the prompt."""
        return [node.token for node in self.upwards() if node.parent][::-1]

    def upwards(self) -> Iterator[Node]:
        """This node, its parent, and so on to the root."""
        node: Node | None = self
        while node:
            yield node
            node = node.parent


def closure(nodes: Iterable[Node], known: Iterable[Node] = ()) -> list[Node]:
    """Nodes and all their ancestors, without those that are `known` and what is above them; a
    parent stands before its children."""
    visited, closed = set(known), list[Node]()
    for node in nodes:
        fresh: list[Node] = []
        for above in node.upwards():
            if above in visited:
                break
            fresh.append(above)
        visited.update(fresh)
        closed += fresh[::-1]
    return closed
