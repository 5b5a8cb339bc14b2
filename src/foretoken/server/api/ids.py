"""New ids of answers and their parts."""

from __future__ import annotations

from uuid import uuid4


def fresh(prefix: str) -> str:
    """Return a new id."""
    return f"{prefix}-{uuid4().hex}"
