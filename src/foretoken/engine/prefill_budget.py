"""The budget of chunked prefill: how many prompt tokens are read beside the rows that run, so that
a step takes at most a few times as long as one without prefill, or no longer than anybody notices.

Measured as steps go by. The budget changes how soon a row joins in, never its text.
"""

from __future__ import annotations

from collections import deque
from itertools import chain, combinations

import numpy as np
from numpy.typing import NDArray

from foretoken.request import Row, RowState

LONGEST = 1.75  # times a step that reads nothing
UNNOTICED = 0.03  # seconds that a step may take in any case
LEAST, FIRST, MOST = 16, 64, 512  # tokens of a step: in any case, as long as nothing is known
STEPS = 32  # of each kind that are remembered


class PrefillBudget:
    """Measured times of steps, by the rows that ran and the prompt tokens that were read."""

    def __init__(self) -> None:
        # apart, as for as long as a long prompt is read there are none of the others
        self._plain: deque[tuple[int, int, float]] = deque(maxlen=STEPS)
        self._reading: deque[tuple[int, int, float]] = deque(maxlen=STEPS)

    def most(self, running: int, reading: int) -> int:
        """Tokens to read in a step beside so many rows that run, of so many others."""
        if not running:
            return MOST
        if not self._reading:
            return FIRST
        plain, token = self._costs(running)
        longer = max((LONGEST - 1) * plain * reading, UNNOTICED - plain)
        return int(min(MOST, max(LEAST, longer / token)))

    def reads(self, rows: list[Row], already: int = 0) -> list[int]:
        """Return how many tokens each row reads: running rows their last one, rows in prefill as
        many as the budget allows, first come first, where `already` have been read. Rows that
        report logprobs of their prompts read these in forwards of their own."""
        room = 0
        running = sum(row.state is RowState.RUNNING for row in rows)
        if running < len(rows):
            room = max(LEAST, self.most(running, len(rows) - running) - already)
        reads: list[int] = []
        for row in rows:
            runs = row.state is RowState.RUNNING
            count = 1 if runs else min(row.pending, room) * (not row.telling)
            room -= 0 if runs else count
            reads.append(count)
        return reads

    def see(self, reads: list[int], seconds: float) -> None:
        """Note the time of a step."""
        more = sum(count for count in reads if count > 1)
        (self._reading if more else self._plain).append((reads.count(1), more, seconds))

    def _costs(self, running: int) -> tuple[float, float]:
        """Seconds of a step of so many rows that reads nothing, and of a token that it reads: a
        fit that is linear in both, of the least relative error, as some steps take many times as
        long as others like them."""
        steps = np.array([*self._plain, *self._reading])
        weights = 1 / np.maximum(steps[:, 2], 1e-9)
        weighted = np.column_stack([np.ones(len(steps)), steps[:, :2]]) * weights[:, None]
        base, row, token = _positive_fit(weighted)
        return base + row * running, max(1e-9, token)


def _positive_fit(columns: NDArray[np.float64]) -> list[float]:
    """The factors of columns, none below 0, whose sum is nearest to 1: nothing takes less than no
    time, and noise that says so would leave all to the others."""
    count, best, least = columns.shape[1], [0.0] * columns.shape[1], np.inf
    for kept in chain.from_iterable(combinations(range(count), n) for n in range(count, 0, -1)):
        some = columns[:, kept]
        factors = np.linalg.lstsq(some, np.ones(len(some)))[0]
        error = float(((some @ factors - 1) ** 2).sum())
        if (factors >= 0).all() and error < least:
            best, least = [0.0] * count, error
            for i, factor in zip(kept, factors.tolist(), strict=True):
                best[i] = factor
            if len(kept) == count:  # fewer are no nearer
                break
    return best
