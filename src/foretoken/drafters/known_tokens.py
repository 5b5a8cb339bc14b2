"""Guesses that rows have without a drafter: what their requests predict, what their grammars force.

They are certain, cost nothing, and are judged like all others. Knows no models.
"""

from __future__ import annotations

from dataclasses import replace

from foretoken.drafters.base import Draft, Drafter, DrafterBase, pack
from foretoken.drafters.mixture import joined, joined_tops
from foretoken.sampling.draw import Draw
from foretoken.transfer import listed


class KnownTokensDrafter(DrafterBase):
    """For one step: `given[b]` for row b, or where that is empty what `drafter` guesses. predicted:
    the rows whose draft tokens are of their own prediction."""

    def __init__(
        self, drafter: Drafter, given: list[list[int]], predicted: frozenset[int] = frozenset()
    ) -> None:
        self.drafter, self.given, self.predicted = drafter, given, predicted

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.drafter.start(rows, prompts, sources)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = replace(pack(self.given), predicted=self.predicted)
        budget = [0 if x else g for x, g in zip(self.given, gamma, strict=True)]
        if not any(budget):
            return draft
        drafts = [draft, self.drafter.propose(budget, draw)]
        drafted = zip(listed(drafts[1].tokens), listed(drafts[1].lengths), strict=True)
        draft_tokens = [x or ids[:n] for x, (ids, n) in zip(self.given, drafted, strict=True)]
        packed = pack(draft_tokens, joined(drafts), drafts[1].calls)
        return replace(packed, tops=joined_tops(drafts), predicted=self.predicted)

    def commit(self, tokens: list[list[int]]) -> None:
        self.drafter.commit(tokens)

    def leave(self, rows: list[int]) -> None:
        self.drafter.leave(rows)
