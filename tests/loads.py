"""What `foretoken.load` refuses, in one line."""

from __future__ import annotations

import pytest

import foretoken
from foretoken.errors import ForetokenError

PADDED = 336  # output rows of a target, for 320 tokens


def refused(kind: type[ForetokenError], says: str, *args, **options) -> str:
    with pytest.raises(kind, match=says) as error:
        foretoken.load(*args, **options)
    message = str(error.value)
    assert "\n" not in message and len(message) < 500
    return message
