"""Generation without models and clocks: draft tokens of known chances under a policy of gamma.

A text has a beta at every place: how likely a draft token there is kept, whatever the policy.
Seconds follow from given costs, so that policies compare to the last digit. Used by
automatic_gamma.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from foretoken.costing.costs import Costs
from foretoken.costing.gamma import MAX_GAMMA, NO_OTHER_WORK, GammaPolicy, OtherWork
from foretoken.records import StepRecord
from foretoken.request import Request, SequenceState
from foretoken.sampling.keys import SequenceKey


@dataclass(frozen=True, slots=True)
class Text:
    """A guess at a place is kept where the number there, in [0, 1), is below its beta. Both lists
    reach MAX_GAMMA beyond `tokens`."""

    tokens: int
    betas: list[float]
    numbers: list[float]
    greedy: bool = False  # the policy sees outcomes, not betas, as at temperature 0
    decay: float = 1.0  # every further draft token of a draft has this share of its beta

    def propose(self, place: int, i: int) -> tuple[bool, float]:
        """Whether draft token i (from 0) of a draft, at `place`, is kept, and the overlap
        recorded."""
        beta = self.betas[place] * self.decay**i
        accepted = self.numbers[place] < beta
        return accepted, float(accepted) if self.greedy else beta


def replay(gamma: GammaPolicy, text: Text, costs: Costs) -> tuple[float, SequenceState]:
    """Seconds that a lone row takes until its end, and the row with its records."""
    last = 0

    def price(gammas: list[int]) -> float:
        nonlocal last
        (g,) = gammas
        change, last = costs.change * (last != 1 + g), 1 + g
        return float(change + costs.draft_seconds(g, g, 1) + costs.target_seconds(1 + g, 1 + g))

    seconds, (row,) = replay_batch(gamma, [text], price)
    return seconds, row


def replay_batch(
    gamma: GammaPolicy, texts: list[Text], price: Callable[[list[int]], float]
) -> tuple[float, list[SequenceState]]:
    """Seconds until the last of these rows ends, and the rows with their records. `price` has the
    seconds of a step from the draft tokens of the rows that still run."""
    rows = [
        SequenceState.from_request(Request([0], text.tokens, SequenceKey(0, b)))
        for b, text in enumerate(texts)
    ]
    seconds = 0.0
    while running := [
        (row, text) for row, text in zip(rows, texts, strict=True) if not row.finish_reason
    ]:
        chosen = gamma.choose_gammas([row for row, _ in running])
        drafted = [
            min(g, row.num_remaining - 1) for g, (row, _) in zip(chosen, running, strict=True)
        ]
        seconds += price(drafted)
        for n, (row, text) in zip(drafted, running, strict=True):
            judged = _judged(text, len(row.new_tokens), n)
            accepted = sum(kept for kept, _ in judged)
            tokens = tuple(row.commit([0] * (accepted + 1)))
            overlaps = tuple(overlap for _, overlap in judged)
            times = 0.0, 0.0, 0.0
            record = StepRecord(n, (0,) * n, accepted, tokens, overlaps, n, *times, len(running))
            row.records.append(record)
    return seconds, rows


def _judged(text: Text, place: int, most: int) -> list[tuple[bool, float]]:
    """The draft tokens at `place` up to the first that is not kept."""
    draft_tokens: list[tuple[bool, float]] = []
    for i in range(most):
        draft_tokens.append(text.propose(place + i, i))
        if not draft_tokens[-1][0]:
            break
    return draft_tokens


class Oracle:
    """Knows which guesses will be kept, and asks for these alone (paper, section 3.5)."""

    def __init__(self, text: Text) -> None:
        self.text = text

    @property
    def max_gamma(self) -> int:
        return MAX_GAMMA

    def choose_gammas(
        self, rows: list[SequenceState], beside: OtherWork = NO_OTHER_WORK
    ) -> list[int]:
        return [self._kept(len(row.new_tokens)) for row in rows]

    def _kept(self, place: int) -> int:
        return sum(accepted for accepted, _ in _judged(self.text, place, MAX_GAMMA))
