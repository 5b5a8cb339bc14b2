"""Short continuations of a prompt sorted into cells, so that two samples of them can be compared.

A cell is a beginning that is frequent in a third sample: one token where the law is flat, several
where it is peaked. Knows ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

Text = tuple[int, ...]


class Cells:
    """A text belongs to its longest frequent beginning; the empty beginning is always a cell."""

    def __init__(self, sample: Iterable[Text], share: float = 0.04) -> None:
        texts = list(sample)
        counts = Counter(text[:n] for text in texts for n in range(1, len(text) + 1))
        frequent = [head for head, count in counts.items() if count >= share * len(texts)]
        self._cells = {head: i for i, head in enumerate([(), *sorted(frequent)])}

    def counts(self, texts: Iterable[Text]) -> np.ndarray:
        """Number of texts in each cell, float64."""
        counts = np.zeros(len(self._cells))
        for text in texts:
            counts[self._of(text)] += 1
        return counts

    def _of(self, text: Text) -> int:
        heads = (text[:n] for n in range(len(text), -1, -1))
        return next(self._cells[head] for head in heads if head in self._cells)


def tables(
    sample: Sequence[list[Text]], ours: Sequence[list[Text]], theirs: Sequence[list[Text]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts of two samples by prompt, in the cells of a third one."""
    cells = [Cells(texts) for texts in sample]
    return [
        (cell.counts(a), cell.counts(b)) for cell, a, b in zip(cells, ours, theirs, strict=True)
    ]
