"""Rates of speculation over all requests, as /v1/speculation returns them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from foretoken.records import StepRecord

ALPHA_DECAY = 0.98  # of the mean, with each step of a sequence


class SpecDecodeStats:
    """Sums since the server began, and a recent mean."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0
        self.accepted_at: Counter[int] = Counter()  # accepted draft tokens, by place
        self.drafted_at: Counter[int] = Counter()  # draft tokens, by place
        self.alpha: float | None = None  # recent
        # steps of a draft's, by how many draft tokens they made
        self.steps_by_drafted: Counter[int] = Counter()

    def record(self, steps: Iterable[StepRecord], *, plain: bool) -> None:
        """Count new steps of an output; `plain`: it was asked for without draft tokens."""
        for step in steps:
            self.steps += 1
            self.tokens += len(step.new_tokens)
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.drafted_at.update(range(step.drafted))
            self.accepted_at.update(range(step.accepted))
            if step.predicted:
                continue  # alpha is the draft's
            self.steps_by_drafted[step.drafted] += not plain
            for overlap in step.overlaps:
                earlier = overlap if self.alpha is None else self.alpha
                self.alpha = ALPHA_DECAY * earlier + (1 - ALPHA_DECAY) * overlap

    def compute_rates(self) -> dict[str, Any]:
        """Return the rates; None where nothing is known yet."""
        return {
            "active": self.drafted > 0 if self.steps else None,
            "alpha": self.alpha,
            "tokens_per_call": self.tokens / self.steps if self.steps else None,
            "acceptance_by_position": [
                self.accepted_at[i] / drafted for i, drafted in sorted(self.drafted_at.items())
            ],
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": self.tokens,
        }
