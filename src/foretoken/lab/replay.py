"""Generation without models and clocks: chances of guesses, known in advance, under a policy.

A text has a beta at every place: how likely a guess there is kept, whatever the policy. Seconds
are those that the costs say, so that policies can be compared to the last digit.
"""

from __future__ import annotations

from dataclasses import dataclass

from foretoken.costs import Costs
from foretoken.gamma import MAX_GAMMA, Gamma
from foretoken.request import Request, Row, StepRecord
from foretoken.sampling.keys import RowKey


@dataclass(frozen=True, slots=True)
class Text:
    """One number in [0, 1) per place decides whether its guess is kept; both lists must reach
    MAX_GAMMA beyond `tokens`."""

    tokens: int
    betas: list[float]
    numbers: list[float]
    greedy: bool = False  # only the outcome is seen, as at temperature 0, not beta
    decay: float = 1.0  # what every further guess of a draft keeps of its beta

    def guess(self, place: int, i: int) -> tuple[bool, float]:
        """Whether guess i (from 0) of a draft, at `place`, is kept, and the overlap recorded."""
        beta = self.betas[place] * self.decay**i
        kept = self.numbers[place] < beta
        return kept, float(kept) if self.greedy else beta


def replay(gamma: Gamma, text: Text, costs: Costs) -> tuple[float, Row]:
    """Seconds that a lone row takes to come to its end, and the row, with its records."""
    row = Row.of(Request([0], text.tokens, RowKey(0, 0)))
    seconds = 0.0
    while not row.finish_reason:
        place = len(row.new_tokens)
        (wanted,) = gamma.ask([row])
        asked = min(wanted, row.room - 1)
        judged = _judged(text, place, asked)
        accepted = sum(kept for kept, _ in judged)
        kept = row.commit([0] * (accepted + 1))
        seconds += costs.seconds(asked)
        overlaps = tuple(overlap for _, overlap in judged)
        record = StepRecord(
            asked, (0,) * asked, accepted, tuple(kept), overlaps, asked, 0.0, 0.0, 0.0, 1
        )
        row.records.append(record)
    return seconds, row


def _judged(text: Text, place: int, asked: int) -> list[tuple[bool, float]]:
    found: list[tuple[bool, float]] = []
    for i in range(asked):
        found.append(text.guess(place + i, i))
        if not found[-1][0]:
            break
    return found


class Oracle:
    """Knows which guesses will be kept, and makes no others (paper, section 3.5)."""

    def __init__(self, text: Text) -> None:
        self.text = text

    def ask(self, rows: list[Row]) -> list[int]:
        return [self._kept(len(row.new_tokens)) for row in rows]

    def _kept(self, place: int) -> int:
        return sum(kept for kept, _ in _judged(self.text, place, MAX_GAMMA))
