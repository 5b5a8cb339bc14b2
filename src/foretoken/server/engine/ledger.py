"""What all requests' steps come to: rates of speculation, as /v1/speculation tells them."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from foretoken.serving.engine import Event
    from foretoken.speculator import Speculator

RECENT = 0.98  # the weight of what was known, with each step of a row


class Ledger:
    """Sums since the process began, and a mean of late."""

    def __init__(self) -> None:
        self.steps = self.drafted = self.accepted = self.tokens = 0
        self.kept_at: Counter[int] = Counter()  # accepted guesses, by place
        self.made_at: Counter[int] = Counter()  # guesses, by place
        self.alpha: float | None = None  # of late
        self.speeds: dict[bool, list[float]] = {True: [0.0, 0.0], False: [0.0, 0.0]}

    def note(self, event: Event) -> None:
        """One event of the engine."""
        for step in event.steps:
            self.steps += 1
            self.tokens += len(step.kept)
            self.drafted += step.drafted
            self.accepted += step.accepted
            self.made_at.update(range(step.drafted))
            self.kept_at.update(range(step.accepted))
            for overlap in () if step.predicted else step.overlaps:  # alpha is the draft's
                known = overlap if self.alpha is None else self.alpha
                self.alpha = RECENT * known + (1 - RECENT) * overlap
        if event.completion is not None:
            stats = event.completion.stats
            sums = self.speeds[stats.drafted > 0]
            sums[0] += len(event.completion.tokens)
            sums[1] += stats.seconds - stats.prefill_seconds

    def report(self, spec: Speculator) -> dict[str, Any]:
        """Rates; None where nothing is known yet."""
        costs = spec.known_costs()
        return {
            "active": self.drafted > 0 if self.steps else None,
            "alpha": self.alpha,
            "c": None if costs is None else costs.c,
            "v": None if costs is None else [[n, costs.v(n)] for n, _ in costs.score],
            "predicted_speedup": None if costs is None else self._predicted(costs),
            "measured_speedup": self._measured(),
            "tokens_per_call": self.tokens / self.steps if self.steps else None,
            "acceptance_by_position": self.by_position(),
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": self.tokens,
        }

    def by_position(self) -> list[float]:
        """Of the guesses made at each place, the share that was kept."""
        return [self.kept_at[i] / made for i, made in sorted(self.made_at.items())]

    def _predicted(self, costs: Any) -> float | None:
        """Of one row, at the gamma that pays best (Theorem 3.8, with the pass's own cost)."""
        from foretoken.theory import walltime_factor

        if self.alpha is None:
            return None
        alpha = min(self.alpha, 0.999)  # the formula's sum ends below 1
        gammas = range(int(costs.draft[-1][0]) + 1)
        return max(walltime_factor(alpha, gamma, costs.c, v=costs.v) for gamma in gammas)

    def _measured(self) -> float | None:
        """Tokens a second of texts with guesses over those without, where there were both."""
        (guessed, busy), (plain, idle) = self.speeds[True], self.speeds[False]
        if not (busy and idle and guessed and plain):
            return None
        return (guessed / busy) / (plain / idle)
