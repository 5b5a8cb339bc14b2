"""How much of prompts is read beside rows that run: so much that a step takes at most so many times
as long as one that reads nothing for each that is being read, or as nobody notices.

Measured as steps go by. That changes how soon a row joins in, never its text.
"""

from __future__ import annotations

from collections import deque

import numpy as np

from foretoken.request import Row

LONGEST = 1.75  # times a step that reads nothing
UNNOTICED = 0.03  # seconds that a step may take in any case
LEAST, FIRST, MOST = 16, 64, 512  # tokens of a step: in any case, as long as nothing is known
STEPS = 32  # of each kind that are remembered


class PrefillBudget:
    """What steps took, by how many rows ran and how many tokens others read."""

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
        """How many tokens each row reads: rows that run their last one, and of what is left to read
        the first come most, where so many were read `already`. Nothing of those that tell logprobs
        of it, in passes of their own."""
        room = 0
        if any(row.pending > 1 for row in rows):
            running = sum(row.pending == 1 for row in rows)
            room = max(LEAST, self.most(running, len(rows) - running) - already)
        reads: list[int] = []
        for row in rows:
            count = 1 if row.pending == 1 else min(row.pending, room) * (not row.telling)
            room -= count if row.pending > 1 else 0
            reads.append(count)
        return reads

    def see(self, reads: list[int], seconds: float) -> None:
        """How long a step took."""
        more = sum(count for count in reads if count > 1)
        (self._reading if more else self._plain).append((reads.count(1), more, seconds))

    def _costs(self, running: int) -> tuple[float, float]:
        """Seconds of a step of so many rows that reads nothing, and of a token that it reads: a
        fit that is linear in both, of the least relative error, as some steps take many times as
        long as others like them."""
        steps = np.array([*self._plain, *self._reading])
        weights = 1 / np.maximum(steps[:, 2], 1e-9)
        weighted = np.column_stack([np.ones(len(steps)), steps[:, :2]]) * weights[:, None]
        base, row, token = np.linalg.lstsq(weighted, np.ones(len(steps)))[0]
        return max(0.0, base + row * running), max(1e-9, token)
