"""How much of long prompts is read beside rows that run: so much that a step takes at most so many
times as long as one that reads nothing.

Measured as steps go by. That changes how soon a row joins in, never its text.
"""

from __future__ import annotations

from foretoken.request import Row

LONGEST = 1.75  # times a step that reads nothing
LEAST, MOST = 16, 512  # tokens of a step
FADE = 0.8  # of what was measured, with each step


class Pace:
    """Seconds of steps that read nothing, and of a token that others read."""

    def __init__(self) -> None:
        self._plain: float | None = None
        self._token: float | None = None

    @property
    def most(self) -> int:
        """Tokens to read in the next step."""
        if self._plain is None or not self._token:
            return 4 * LEAST
        return max(LEAST, min(MOST, int((LONGEST - 1) * self._plain / self._token)))

    def reads(self, rows: list[Row]) -> list[int]:
        """How many tokens each row reads: rows that run their last one, and of what is left to read
        the first come most. Nothing of those that tell logprobs of it, in passes of their own."""
        stalls = any(row.behind == 1 for row in rows)
        left = self.most if stalls else MOST
        reads: list[int] = []
        for row in rows:
            count = 1 if row.behind == 1 else min(row.behind, left) * (not row.telling)
            left -= count if row.behind > 1 else 0
            reads.append(count)
        return reads

    def see(self, reads: list[int], seconds: float) -> None:
        """How long a step took."""
        more = sum(count for count in reads if count > 1)
        if not more:
            self._plain = _mean(self._plain, seconds)
        elif self._plain is not None and more < sum(reads):
            self._token = _mean(self._token, max(0.0, seconds - self._plain) / more)


def _mean(old: float | None, new: float) -> float:
    return new if old is None else FADE * old + (1 - FADE) * new
