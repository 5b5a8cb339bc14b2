"""JSON that somebody else may have written."""

from __future__ import annotations

import json
from typing import Any


def read(text: str | bytes, **options: Any) -> Any:
    """Its value; ValueError for all that cannot be read, also for what nests too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
