"""Text files that options name."""

from __future__ import annotations

from pathlib import Path

from foretoken.errors import InputError


def text(file: Path, holds: str) -> str:
    """What is in a file that should hold such a thing; InputError where it cannot be read."""
    if not file.exists():
        raise InputError(f"{file} cannot be read: there is no such file; give one with {holds}")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as text in UTF-8: {error}") from None
