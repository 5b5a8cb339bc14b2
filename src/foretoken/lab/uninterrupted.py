"""Completions that ran to their end."""

from __future__ import annotations

from foretoken.request import Completion


def uninterrupted(rows: list[Completion]) -> list[Completion]:
    """`rows`; KeyboardInterrupt where one was interrupted: its times and its text mean nothing."""
    if any(row.finish_reason == "interrupted" for row in rows):
        raise KeyboardInterrupt
    return rows
