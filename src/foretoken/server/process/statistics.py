"""Speculation rates over all requests, for /v1/speculation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

from foretoken.records import StepRecord

ALPHA_DECAY = 0.98  # weight of the former mean at each verified draft token


class SpecDecodeStats:
    """Sums over all steps since the server started, and a moving mean of alpha."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0
        self.accepted_at: Counter[int] = Counter()  # accepted draft tokens, by position in a draft
        self.drafted_at: Counter[int] = Counter()  # draft tokens, by position in a draft
        self.alpha: float | None = None  # moving mean
        # steps with a drafter, by the number of draft tokens
        self.steps_by_drafted: Counter[int] = Counter()

    def record(self, steps: Iterable[StepRecord], *, plain: bool) -> None:
        """Add new steps of an output. `plain`: whether the request set gamma to 0."""
        for step in steps:
            self.steps += 1
            self.tokens += len(step.new_tokens)
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.drafted_at.update(range(step.drafted))
            self.accepted_at.update(range(step.accepted))
            if step.predicted:
                continue  # alpha describes the drafter, not predicted outputs
            self.steps_by_drafted[step.drafted] += not plain
            for overlap in step.overlaps:
                earlier = overlap if self.alpha is None else self.alpha
                self.alpha = ALPHA_DECAY * earlier + (1 - ALPHA_DECAY) * overlap

    def compute_rates(self) -> dict[str, Any]:
        """Return the sums and rates for /v1/speculation. A rate that is not known yet is None."""
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
