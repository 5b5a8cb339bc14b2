"""Rates of speculation over all requests, as /v1/speculation tells them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from foretoken.records import StepRecord
from foretoken.theory import steps_factor

RECENT = 0.98  # the weight of what was known, with each step of a row


class SpecDecodeStats:
    """Sums since the server began, and a mean of late."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0
        self.kept_at: Counter[int] = Counter()  # accepted draft tokens, by place
        self.made_at: Counter[int] = Counter()  # guesses, by place
        self.alpha: float | None = None  # of late
        # steps of a draft's, by how many draft tokens they made
        self.made: Counter[int] = Counter()

    def note(self, steps: Iterable[StepRecord], *, plain: bool) -> None:
        """New steps of a text; `plain`: it was asked for without draft tokens."""
        for step in steps:
            self.steps += 1
            self.tokens += len(step.kept)
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.made_at.update(range(step.drafted))
            self.kept_at.update(range(step.accepted))
            if step.predicted:
                continue  # alpha is the draft's
            self.made[step.drafted] += not plain
            for overlap in step.overlaps:
                earlier = overlap if self.alpha is None else self.alpha
                self.alpha = RECENT * earlier + (1 - RECENT) * overlap

    def rates(self) -> dict[str, Any]:
        """Return the rates; None where nothing is known yet."""
        return {
            "active": self.drafted > 0 if self.steps else None,
            "alpha": self.alpha,
            "tokens_per_call": self.tokens / self.steps if self.steps else None,
            "acceptance_by_position": [
                self.kept_at[i] / drafted for i, drafted in sorted(self.made_at.items())
            ],
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": self.tokens,
        }

    def predicted(self, c: float | None, v: Sequence[tuple[int, float]] | None) -> float | None:
        """Return the speed-up that these costs predict of one text that makes as many draft tokens
        as were made; None where nothing is known yet."""
        if c is None or v is None or self.alpha is None or not any(self.made.values()):
            return None
        tokens, costs = zip(*v, strict=True)
        alpha = min(1.0, self.alpha)
        return steps_factor(alpha, self.made, c, v=lambda n: float(np.interp(n, tokens, costs)))
