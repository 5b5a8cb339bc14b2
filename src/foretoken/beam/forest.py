"""Texts that share their beginnings, as a tree of nodes (a parent and one token each), and many
continuations of each prompt in one model's cache, by either of two forms.

`Shared` keeps a prompt's tree in one row and scores it under a mask: what texts share is cached
once. `Copied` keeps a row for every leaf, for models that cannot score trees: as exact, but slower.
A `Forest` over either scores nodes and remembers their logits. Knows no beams.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Protocol

import torch
from torch import Tensor

from foretoken.models.base import Model, Tree, TreeModel


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


class Branches(Protocol):
    """Trees in a cache, one per prompt; without its root, a prompt is in the cache from the
    start."""

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None) -> None:
        """Trees join; prompts without the token of their root."""
        ...

    def held(self, b: int) -> set[Node]:
        """The nodes of tree b that are in the cache; with each all its ancestors."""
        ...

    def add(self, nodes: list[list[Node]]) -> list[Tensor]:
        """Put nodes in, parents before their children, in one run; logits `[n, V]` for each
        tree, valid until the next."""
        ...

    def keep(self, nodes: list[list[Node]]) -> None:
        """Drop all nodes of each tree but these and their ancestors."""
        ...

    def leave(self, trees: list[int]) -> None:
        """These trees are finished; those behind move up."""
        ...

    def clear(self) -> None:
        """All trees leave, whatever has happened."""
        ...


class Forest:
    """Trees in a model's cache, and the logits of their nodes."""

    def __init__(self, branches: Branches) -> None:
        self.branches = branches
        self.logits: list[dict[Node, Tensor]] = []  # [V] of nodes since the last `keep`
        self.scored: list[int] = []  # nodes that the model has read, per tree

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None) -> None:
        """Trees join; `prompts` without the token of their root."""
        self.branches.start(prompts, sources)
        self.logits += [{} for _ in prompts]
        self.scored += [0] * len(prompts)

    def score(self, nodes: list[list[Node]]) -> list[bool]:
        """Have the logits of these nodes, by at most one run; whether a tree took part in it."""
        fresh = [closure(ns, self.branches.held(b)) for b, ns in enumerate(nodes)]
        if any(fresh):
            for b, logits in enumerate(self.branches.add(fresh)):
                self.logits[b].update(zip(fresh[b], logits, strict=True))
                self.scored[b] += len(fresh[b])
        return [bool(new) for new in fresh]

    def gathered(self, b: int, nodes: list[Node]) -> Tensor:
        """Logits `[n, V]` of nodes of tree b that were scored."""
        return torch.stack([self.logits[b][node] for node in nodes])

    def keep(self, nodes: list[list[Node]]) -> None:
        """Drop all nodes of each tree but these and their ancestors, and the logits of all
        others."""
        self.branches.keep(nodes)
        for b, kept in enumerate(nodes):
            stay = [node for node in kept if node in self.logits[b]]
            self.logits[b] = {node: self.logits[b][node].clone() for node in stay}

    def leave(self, trees: list[int]) -> None:
        """These trees are finished; those behind move up."""
        self.branches.leave(trees)
        self.logits = [x for b, x in enumerate(self.logits) if b not in trees]
        self.scored = [x for b, x in enumerate(self.scored) if b not in trees]

    def clear(self) -> None:
        """All trees leave, whatever has happened."""
        self.branches.clear()
        self.logits, self.scored = [], []


class Shared:
    """A tree in one row: a node has a slot, and sees the prompt and its ancestors."""

    def __init__(self, model: TreeModel) -> None:
        self.model = model
        self.heads: list[int] = []  # slots of the prompt
        self.slots: list[dict[Node, int]] = []  # in ascending order

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None) -> None:
        self.model.start(prompts, sources)
        self.heads += [len(prompt) for prompt in prompts]
        self.slots += [{} for _ in prompts]

    def held(self, b: int) -> set[Node]:
        return set(self.slots[b])

    def add(self, nodes: list[list[Node]]) -> list[Tensor]:
        blocks = [[node.token for node in new] for new in nodes]
        starts = [head + len(slots) for head, slots in zip(self.heads, self.slots, strict=True)]
        for start, slots, new in zip(starts, self.slots, nodes, strict=True):
            slots.update((node, start + i) for i, node in enumerate(new))
        width = max(map(len, blocks))
        logits = self.model.score_tree(blocks, self._tree(nodes, starts, width))
        return [logits[b, : len(new)] for b, new in enumerate(nodes)]

    def _tree(self, nodes: list[list[Node]], starts: list[int], width: int) -> Tree:
        total = max(starts) + width
        depths = torch.zeros(len(nodes), total, dtype=torch.long)
        visible = torch.zeros(len(nodes), width, total, dtype=torch.bool)
        # the first slot is everybody's ancestor; padding must see something
        visible[:, :, 0] = True
        for b, (head, slots) in enumerate(zip(self.heads, self.slots, strict=True)):
            places = [*range(head), *(head + node.depth for node in slots)]
            depths[b, : len(places)] = torch.tensor(places)
            visible[b, :, :head] = True
            for i, node in enumerate(nodes[b]):
                at = -1 if node.parent is None else slots[node.parent] - starts[b]
                if at >= 0:
                    visible[b, i] |= visible[b, at]
                    visible[b, i, slots[node]] = True
                else:
                    visible[b, i, [slots[above] for above in node.upwards()]] = True
        return Tree(depths, visible)

    def keep(self, nodes: list[list[Node]]) -> None:
        stay = [set(closure(kept)) for kept in nodes]
        slots = [[n for n in held if n in s] for held, s in zip(self.slots, stay, strict=True)]
        self.model.keep(
            [
                [*range(head), *(held[node] for node in kept)]
                for head, held, kept in zip(self.heads, self.slots, slots, strict=True)
            ]
        )
        self.slots = [
            {node: head + i for i, node in enumerate(kept)}
            for head, kept in zip(self.heads, slots, strict=True)
        ]

    def leave(self, trees: list[int]) -> None:
        self.model.leave(trees)
        self.heads = [x for b, x in enumerate(self.heads) if b not in trees]
        self.slots = [x for b, x in enumerate(self.slots) if b not in trees]

    def clear(self) -> None:
        self.model.permute([])
        self.heads, self.slots = [], []


class Copied:
    """A row for every leaf of every tree; a new leaf's row is a copy of one that has its
    beginning."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self.heads: list[int] = []
        self.rows: list[tuple[int, Node | None]] = []  # tree and leaf; None: the prompt alone

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None) -> None:
        self.model.start(prompts, sources)
        self.rows += [(len(self.heads) + i, None) for i in range(len(prompts))]
        self.heads += [len(prompt) for prompt in prompts]

    def held(self, b: int) -> set[Node]:
        return set(closure(leaf for owner, leaf in self.rows if owner == b and leaf))

    def add(self, nodes: list[list[Node]]) -> list[Tensor]:
        paths = [(b, path) for b, new in enumerate(nodes) for path in _paths(new)]
        grown = {(b, path[0].parent) for b, path in paths}  # where rows go on
        idle = [row for row in self.rows if row not in grown]
        self._become(idle + [(b, path[0].parent) for b, path in paths])
        self.rows = idle + [(b, path[-1]) for b, path in paths]
        trees: list[dict[Node, Tensor]] = [{} for _ in nodes]
        blocks = [[] for _ in idle] + [[node.token for node in path] for _, path in paths]
        logits = self.model.score(blocks, [len(block) for block in blocks])
        for (b, path), scored in zip(paths, logits[len(idle) :], strict=True):
            trees[b].update(zip(path, scored, strict=False))
        empty = logits.new_zeros(0, self.model.vocab_size)
        return [
            torch.stack([scored[node] for node in new]) if new else empty
            for new, scored in zip(nodes, trees, strict=True)
        ]

    def keep(self, nodes: list[list[Node]]) -> None:
        rows: list[tuple[int, Node | None]] = []
        for b, kept in enumerate(nodes):
            held = self.held(b)
            stay = [node for node in closure(kept) if node in held]
            inner = {node.parent for node in stay}
            rows += [(b, node) for node in stay if node not in inner] or [(b, None)]
        self._become(rows)

    def leave(self, trees: list[int]) -> None:
        self.model.leave([r for r, (b, _) in enumerate(self.rows) if b in trees])
        stay = [b for b in range(len(self.heads)) if b not in trees]
        self.heads = [self.heads[b] for b in stay]
        self.rows = [(stay.index(b), leaf) for b, leaf in self.rows if b in stay]

    def clear(self) -> None:
        self.model.permute([])
        self.heads, self.rows = [], []

    def _become(self, rows: list[tuple[int, Node | None]]) -> None:
        """Rows that end with these nodes, all of them held."""
        having: dict[tuple[int, Node | None], int] = {}
        for r, (b, leaf) in enumerate(self.rows):
            having[b, None] = r
            for node in leaf.upwards() if leaf else ():
                having[b, node] = r
        self.model.permute([having[row] for row in rows])
        ends = [self.heads[b] + (leaf.depth + 1 if leaf else 0) for b, leaf in rows]
        self.model.set_lengths(ends)
        self.rows = rows


def _paths(nodes: list[Node]) -> list[list[Node]]:
    """For every leaf among `nodes` the way to it from above, as far as it is among them."""
    new = set(nodes)
    inner = {node.parent for node in nodes}
    paths: list[list[Node]] = []
    for leaf in nodes:
        if leaf not in inner:
            paths.append([node for node in leaf.upwards() if node in new][::-1])
    return paths
