"""A model that is shown whole texts in its own ids: what its cache holds of them is not read again.

Knows no other vocabulary.
"""

from __future__ import annotations

from torch import Tensor

from foretoken.models.base import Model
from foretoken.models.rows import staying


class Following:
    """The rows of a decoder-only `model`. Of a text that has outgrown its context it reads the
    end: so much that half of the context is free, whenever it is full."""

    def __init__(self, model: Model) -> None:
        self.model = model
        self._cached: list[list[int]] = []

    def start(self, texts: list[list[int]]) -> None:
        """Rows join, with these texts read."""
        ends = [self._end(text) for text in texts]
        self.model.start(ends)
        self._cached += ends

    def score(self, texts: list[list[int] | None], need: list[int]) -> Tensor:
        """Read each row's text, in one pass; None: as it is. Logits `[B, max(need), V]` as
        `Model.score`, behind the last need[b] tokens, of which the model must hold as many."""
        return self.model.score(self._unread(texts, need), need)

    def read(self, texts: list[list[int] | None]) -> None:
        """The same without logits."""
        if any(blocks := self._unread(texts, [0] * len(texts))):
            self.model.score(blocks, [0] * len(blocks))

    def _unread(self, texts: list[list[int] | None], need: list[int]) -> list[list[int]]:
        """What to read of every row, the cache being cut back to what it follows."""
        blocks: list[list[int]] = []
        lengths: list[int] = []
        for b, (text, needed) in enumerate(zip(texts, need, strict=True)):
            end = self._cached[b] if text is None else self._end(text)
            lengths.append(min(agreed(self._cached[b], end), len(end) - needed))
            blocks.append(end[lengths[b] :])
            self._cached[b] = end
        self.model.set_lengths(lengths)
        return blocks

    def permute(self, rows: list[int]) -> None:
        self._cached = [list(self._cached[row]) for row in rows]
        self.model.permute(rows)

    def leave(self, rows: list[int]) -> None:
        self._cached = [self._cached[b] for b in staying(len(self._cached), rows)]
        self.model.leave(rows)

    def holds(self, text: list[int]) -> int:
        """How much of a text the model reads."""
        return len(self._end(text))

    def _end(self, text: list[int]) -> list[int]:
        """As much of a text as the model can hold: a function of its length, so that it begins at
        the same place for long."""
        context = self.model.context
        if context is None or len(text) <= context:
            return list(text)
        half = max(1, context // 2)
        return text[-(-(len(text) - context) // half) * half :]


def agreed(one: list[int], other: list[int]) -> int:
    """How many of their first tokens are the same."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
