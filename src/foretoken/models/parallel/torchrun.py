"""Ranks that torchrun has started, on this machine or several: each runs the same command.

Rank 0 makes of it what it says; the others follow. torchrun ends them all where one fails. Imports
no torch, so that a command can ask at once whether it was started so.
"""

from __future__ import annotations

import os

from foretoken.errors import InputError


def launched() -> bool:
    """Whether torchrun has started this process."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def rank() -> int:
    return int(os.environ["RANK"])


class Launched:
    """The other ranks; InputError where they are not so many."""

    def __init__(self, ranks: int) -> None:
        started = int(os.environ["WORLD_SIZE"])
        if ranks != started:
            raise InputError(
                f"tensor_parallel is {ranks}, but torchrun has started {started} processes; give "
                "the same number to both"
            )
        self.ranks = ranks

    def join(self) -> None:
        """Meet them."""
        from foretoken.models.parallel.part import meet  # late: torch takes seconds

        meet()

    def ended(self) -> list[str]:
        """None: torchrun watches them."""
        return []

    def close(self) -> None:
        """They end when they are told to, or with a connection that is broken."""
