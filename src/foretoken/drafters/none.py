"""A drafter that proposes nothing: speculative decoding with it is plain decoding."""

from __future__ import annotations

from foretoken.drafters.base import Draft, Drafter, Draw, pack


class NoDrafter(Drafter):
    """Proposes no draft tokens, whatever gamma is."""

    def start(
        self, rows: list[int], prompts: list[list[int]], sources: list[list[int]] | None
    ) -> None:
        """Do nothing: this drafter stores no sequences."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        return pack([[] for _ in gamma])

    def commit(self, tokens: list[list[int]]) -> None:
        """Do nothing."""

    def rewind(self, counts: list[int]) -> None:
        """Do nothing."""

    def leave(self, rows: list[int]) -> None:
        """Do nothing."""
