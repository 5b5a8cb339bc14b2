"""Which pages hold which beginnings of texts, so that what was read once serves every text that
begins alike.

A tree of whole pages, found by their very tokens: nothing is taken for another text's because two
hashes happen to agree. Knows no models; a page that is written anew must be forgotten first.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field

Key = tuple[int, ...]  # the tokens of a page


@dataclass(slots=True, eq=False)
class _Node:
    """A page behind the pages of its ancestors."""

    page: int
    depth: int = 0
    key: Key = ()
    parent: _Node | None = None
    below: dict[Key, _Node] = field(default_factory=dict)


class Prefixes:
    """Beginnings of texts, apart by salt: what one salt's texts have read serves no other's."""

    def __init__(self) -> None:
        self._roots: dict[Hashable, _Node] = {}
        self._nodes: dict[int, _Node] = {}  # by page

    def find(self, tokens: list[int], size: int, salt: Hashable) -> list[int]:
        """The pages, of `size` tokens each, that hold the longest known beginning."""
        node, pages = self._roots.get(salt), list[int]()
        for key in _keys(tokens, size):
            node = None if node is None else node.below.get(key)
            if node is None:
                break
            pages.append(node.page)
        return pages

    def note(self, tokens: list[int], pages: list[int], size: int, salt: Hashable) -> None:
        """These pages hold this text, of which whole pages count. Where other pages hold the same,
        those stay known."""
        if len(tokens) < size:
            return
        node = self._roots.setdefault(salt, _Node(-1))
        for key, page in zip(_keys(tokens, size), pages, strict=False):
            child = node.below.get(key)
            if child is None:
                if page in self._nodes:  # of another text, though it is the same page
                    return
                child = _Node(page, node.depth + 1, key, node)
                node.below[key] = self._nodes[page] = child
            node = child

    def forget(self, page: int) -> None:
        """The page is about to be written to; what stands behind it cannot be found any more."""
        node = self._nodes.get(page)
        if node is None:
            return
        if node.parent is not None:
            node.parent.below.pop(node.key, None)
            if node.depth == 1 and not node.parent.below:  # else every salt ever seen would stay
                self._roots = {salt: root for salt, root in self._roots.items() if root.below}
        behind = [node]
        while behind:
            node = behind.pop()
            self._nodes.pop(node.page, None)
            behind += node.below.values()

    def __contains__(self, page: object) -> bool:
        """Whether a page holds part of a text that can be found."""
        return page in self._nodes


def _keys(tokens: list[int], size: int) -> Iterator[Key]:
    """The whole pages of a text."""
    for at in range(0, len(tokens) - size + 1, size):
        yield tuple(tokens[at : at + size])
