"""Tokens that a row's grammar leaves no choice about, as guesses that cost nothing.

They are judged like all others: other tokens may spell the same text. Knows no models.
"""

from __future__ import annotations

from dataclasses import replace

from foretoken.drafters.base import Draft, Drafter, pack
from foretoken.drafters.mixture import joined, joined_tops
from foretoken.sampling.draw import Draw


class ForcedDrafter:
    """Guesses what is forced, and where nothing is what `drafter` guesses."""

    def __init__(self, drafter: Drafter) -> None:
        self.drafter, self.holds = drafter, (drafter,)

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        self.drafter.start(rows, prompts, sources)

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        asked = zip(draw.controls, draw.before, gamma, strict=True)
        forced = [c.forced(before)[:g] if c and g else [] for c, before, g in asked]
        free = [0 if x else g for x, g in zip(forced, gamma, strict=True)]
        if not any(forced):
            return self.drafter.propose(gamma, draw)
        if not any(free):
            return pack(forced)
        drafts = [pack(forced), self.drafter.propose(free, draw)]
        drafted = zip(drafts[1].tokens.tolist(), drafts[1].lengths.tolist(), strict=True)
        guesses = [x or ids[:n] for x, (ids, n) in zip(forced, drafted, strict=True)]
        made = pack(guesses, joined(drafts), drafts[1].calls)
        return replace(made, tops=joined_tops(drafts))

    def commit(self, tokens: list[list[int]]) -> None:
        self.drafter.commit(tokens)

    def leave(self, rows: list[int]) -> None:
        self.drafter.leave(rows)
