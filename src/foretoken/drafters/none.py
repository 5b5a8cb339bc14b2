"""No draft tokens at all: speculative decoding with this drafter is plain decoding."""

from __future__ import annotations

from foretoken.drafters.base import Draft, Drafter, Draw, pack


class NoDrafter(Drafter):
    """Never guesses, whatever gamma is asked for."""

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        """Nothing to remember."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([[] for _ in gamma])

    def commit(self, tokens: list[list[int]]) -> None:
        """Nothing to learn."""

    def rewind(self, counts: list[int]) -> None:
        """Nothing to take back."""

    def leave(self, rows: list[int]) -> None:
        """Nothing to forget."""
