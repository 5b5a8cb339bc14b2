"""What outlives a process: small JSON files of things found out once, in the user's cache folder.

A file that is missing, broken or cannot be written only means that the next process finds out
again. It does not know what the things are.
"""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from foretoken import documents


def cache_folder() -> Path:
    """`$XDG_CACHE_HOME/foretoken`, or `~/.cache/foretoken`."""
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    if base.startswith("~"):  # nobody's home
        base = tempfile.gettempdir()
    return Path(base) / "foretoken"


def remembered(file: str) -> dict[str, Any]:
    """Everything in a file, by key."""
    try:
        found = documents.read((cache_folder() / file).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(file: str, key: str, value: Any) -> None:
    """Add to a file, atomically: another process sees it before or after, never half of it."""
    made = None
    try:
        cache_folder().mkdir(parents=True, exist_ok=True)
        everything = json.dumps(remembered(file) | {key: value})
        with tempfile.NamedTemporaryFile("w", dir=cache_folder(), delete=False) as out:
            made = out.name
            out.write(everything)
        os.replace(made, cache_folder() / file)
    except OSError:
        if made:
            Path(made).unlink(missing_ok=True)


def forget() -> None:
    """Remove every file of things found out once."""
    for file in cache_folder().glob("*.json"):
        file.unlink(missing_ok=True)
