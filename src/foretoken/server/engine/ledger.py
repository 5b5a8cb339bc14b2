"""What all requests' steps come to: rates of speculation, as /v1/speculation tells them."""

from __future__ import annotations

from collections import Counter, defaultdict
from operator import add
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
        # tokens and seconds of texts, by how many ran (in powers of two), with guesses and without
        self.speeds: defaultdict[tuple[int, bool], list[float]] = defaultdict(_nothing)

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
                earlier = overlap if self.alpha is None else self.alpha
                self.alpha = RECENT * earlier + (1 - RECENT) * overlap
        if event.completion is not None:
            stats = event.completion.stats
            rows = event.steps[-1].rows if event.steps else 1
            sums = self.speeds[rows.bit_length(), stats.drafted > 0]
            tokens, seconds, _ = event.completion.steady
            sums[0] += tokens
            sums[1] += seconds

    def report(self, spec: Speculator) -> dict[str, Any]:
        """Rates; None where nothing is known yet."""
        costs = spec.known_costs()
        return self.rates() | {
            "c": None if costs is None else costs.c,
            "v": None if costs is None else [[n, costs.v(n)] for n, _ in costs.score],
            "predicted_speedup": None if costs is None else self._predicted(costs),
        }

    def rates(self) -> dict[str, Any]:
        """Those that follow from the steps alone."""
        return {
            "active": self.drafted > 0 if self.steps else None,
            "alpha": self.alpha,
            "measured_speedup": self._measured(),
            "tokens_per_call": self.tokens / self.steps if self.steps else None,
            "acceptance_by_position": self.by_position(),
            "steps": self.steps,
            "drafted": self.drafted,
            "accepted": self.accepted,
            "tokens": self.tokens,
        }

    def add(self, other: Ledger) -> None:
        """What another engine's steps come to, too."""
        rates = [(each.alpha, each.drafted) for each in (self, other) if each.alpha is not None]
        weight = sum(drafted for _, drafted in rates)
        self.alpha = sum(a * drafted for a, drafted in rates) / weight if weight else None
        for name in ("steps", "drafted", "accepted", "tokens"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.kept_at += other.kept_at
        self.made_at += other.made_at
        for kind, sums in other.speeds.items():
            self.speeds[kind] = [*map(add, self.speeds[kind], sums)]

    def by_position(self) -> list[float]:
        """Of the guesses made at each place, the share that was kept."""
        return [self.kept_at[i] / drafted for i, drafted in sorted(self.made_at.items())]

    def _predicted(self, costs: Any) -> float | None:
        """Of one row, at the gamma that pays best (Theorem 3.8, with the pass's own cost)."""
        from foretoken.theory import walltime_factor

        if self.alpha is None:
            return None
        alpha = min(self.alpha, 0.999)  # the formula's sum ends below 1
        gammas = range(int(costs.draft[-1][0]) + 1)
        return max(walltime_factor(alpha, gamma, costs.c, v=costs.v) for gamma in gammas)

    def _measured(self) -> float | None:
        """How long texts with guesses would have taken plainly over what they took: at the speed of
        those without that ran among as many. None where there were none such."""
        plainly = total = 0.0
        for (rows, guessed), (tokens, seconds) in list(self.speeds.items()):
            plain, alone = self.speeds.get((rows, False), (0.0, 0.0))
            if guessed and plain:
                plainly += tokens * alone / plain
                total += seconds
        return plainly / total if total else None


def together(reports: list[tuple[Ledger, dict[str, Any]]]) -> dict[str, Any]:
    """One report of several engines': what follows from the steps from all of them, the costs,
    which they share, from the first, and of what these predict the mean by tokens."""
    sums = Ledger()
    for ledger, _ in reports:
        sums.add(ledger)
    speedups = [(r["predicted_speedup"], ledger.tokens) for ledger, r in reports]
    speedups = [(factor, tokens) for factor, tokens in speedups if factor is not None]
    weight = sum(tokens for _, tokens in speedups)
    mean = sum(factor * tokens for factor, tokens in speedups) / weight if weight else None
    return reports[0][1] | sums.rates() | {"predicted_speedup": mean}


def _nothing() -> list[float]:
    return [0.0, 0.0]
