"""Data URLs, which contain a file in base64."""

from __future__ import annotations

import base64
import binascii
from typing import Any

from foretoken.errors import InputError, format_value

DATA_URL_PREFIX = "data:"


def is_data_url(value: Any) -> bool:
    """Return whether a value is a data URL."""
    return isinstance(value, str) and value[: len(DATA_URL_PREFIX)].lower() == DATA_URL_PREFIX


def decode_data_url(url: str, label: str) -> bytes:
    """Return the bytes in a data URL. Raises InputError if they are not in base64."""
    head, comma, body = url.partition(",")
    if not comma or not head.lower().endswith(";base64"):
        raise InputError(f"{label} is {format_value(url)}; give a data URL in base64")
    return decode_base64(body, label)


def decode_base64(text: str, label: str) -> bytes:
    """Return the bytes of a base64 string. Raises InputError if it is invalid."""
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise InputError(f"{label} is not valid base64; encode it again") from None
