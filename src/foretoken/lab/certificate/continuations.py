"""Short texts behind a prompt as cells, so that two samples of them can be compared.

Cells are beginnings that are frequent in a third sample: of single tokens where the law is flat, of
several where it is not. Knows ids only.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np

Text = tuple[int, ...]


class Cells:
    """A text belongs to the longest frequent beginning that it has; the empty one is always one."""

    def __init__(self, sample: Iterable[Text], share: float = 0.04) -> None:
        texts = list(sample)
        counts = Counter(text[:n] for text in texts for n in range(1, len(text) + 1))
        frequent = [head for head, count in counts.items() if count >= share * len(texts)]
        self._cells = {head: i for i, head in enumerate([(), *sorted(frequent)])}

    def counts(self, texts: Iterable[Text]) -> np.ndarray:
        """How many of the texts are in each cell, float64."""
        found = np.zeros(len(self._cells))
        for text in texts:
            found[self._of(text)] += 1
        return found

    def _of(self, text: Text) -> int:
        heads = (text[:n] for n in range(len(text), -1, -1))
        return next(self._cells[head] for head in heads if head in self._cells)


def tables(
    sample: Sequence[list[Text]], ours: Sequence[list[Text]], theirs: Sequence[list[Text]]
) -> list[tuple[np.ndarray, np.ndarray]]:
    """Counts of two samples by prompt, in cells that a third one makes."""
    cells = [Cells(texts) for texts in sample]
    return [
        (cell.counts(a), cell.counts(b)) for cell, a, b in zip(cells, ours, theirs, strict=True)
    ]
