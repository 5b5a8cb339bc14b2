"""Texts that share a prompt, as nodes of a tree, and a model that scores many in one pass."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch import Tensor

from foretoken.models.base import Model


class Node:
    """A text; the root is the prompt.

    There is one node for each text below a root, so nodes are compared by identity.
    """

    __slots__ = ("_children", "depth", "parent", "token")

    def __init__(self, token: int = -1, parent: Node | None = None) -> None:
        self.token, self.parent = token, parent
        self.depth: int = parent.depth + 1 if parent else 0  # new tokens
        self._children: dict[int, Node] = {}

    def child(self, token: int) -> Node:
        """Return the text that is one token longer."""
        if token not in self._children:
            self._children[token] = Node(token, self)
        return self._children[token]

    @property
    def new_tokens(self) -> list[int]:
        """The tokens after the prompt."""
        return [node.token for node in self.upwards() if node.parent][::-1]

    def upwards(self) -> Iterator[Node]:
        """Yield this node, its parent, and so on to the root."""
        node: Node | None = self
        while node:
            yield node
            node = node.parent


class ScoredTree:
    """The logits of nodes of one prompt's tree.

    A pass has a row for each text that no other text of the pass extends, and reads the prompt with
    each. It needs no mask or cache of its own, so every model that scores blocks can be used.
    """

    def __init__(self, model: Model, prompt: list[int], source: list[int] | None = None) -> None:
        self.model, self.prompt, self.source = model, prompt, source
        self.logits: dict[Node, Tensor] = {}  # [V], of the nodes that were scored last
        self.calls = 0  # passes
        self.scored = 0  # nodes, each counted once

    def score(self, nodes: Iterable[Node]) -> None:
        """Make `logits` those of these nodes, by one pass over the ones that it does not have."""
        wanted = list(dict.fromkeys(nodes))
        new = {node for node in wanted if node not in self.logits}
        self.logits = {node: self.logits[node] for node in wanted if node not in new}
        if new:
            self._run(new)

    def _run(self, new: set[Node]) -> None:
        inner = {above for node in new for above in node.upwards() if above is not node}
        leaves = [node for node in new if node not in inner]
        need = [
            1 + leaf.depth - min(x.depth for x in leaf.upwards() if x in new) for leaf in leaves
        ]
        sources = None if self.source is None else [self.source] * len(leaves)
        try:
            self.model.start([[] for _ in leaves], sources)
            scored = self.model.score([self.prompt + leaf.new_tokens for leaf in leaves], need)
            for leaf, logits, n in zip(leaves, scored, need, strict=True):
                path = [node for _, node in zip(range(n), leaf.upwards(), strict=False)][::-1]
                self.logits.update((x, y.clone()) for x, y in zip(path, logits[:n], strict=True))
        finally:
            self.model.permute([])  # no rows are left
        self.calls, self.scored = self.calls + 1, self.scored + len(new)
