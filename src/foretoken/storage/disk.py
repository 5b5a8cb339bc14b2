"""What outlives a process: small JSON files of things found out once, in the user's cache folder.

A file that is missing, broken or cannot be written only means that the next process finds out
again. It does not know what the things are.
"""

from __future__ import annotations

import json
import logging
import os
import tempfile
from functools import lru_cache
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from typing import Any

from foretoken.storage import documents, files

log = logging.getLogger(__name__)


def cache_folder() -> Path | None:
    """`$XDG_CACHE_HOME/foretoken`, or `~/.cache/foretoken`; where nobody's home is known, a folder
    of the user's own among the temporary files. It is made, for its owner alone.

    None where that cannot be, or where others could have put something there: models that were
    converted and costs that were measured are then not kept.
    """
    base = os.path.expanduser(os.environ.get("XDG_CACHE_HOME") or "~/.cache")
    name = "foretoken"
    if base.startswith("~"):
        base, name = tempfile.gettempdir(), f"foretoken-{_user()}"
    folder = Path(base) / name
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        problem = _strangers(folder)
    except OSError:
        return None
    if problem:
        _warn(
            f"{folder} is not used as a cache, for {problem}; remove it, and it is made anew for "
            "yourself alone, or set XDG_CACHE_HOME to another folder"
        )
    return None if problem else folder


def _strangers(folder: Path) -> str | None:
    """Why what stands in a folder may be somebody else's."""
    for found in (folder.lstat(), folder.stat()):  # of a link, too
        if found.st_uid != _user():
            return f"it belongs to user {found.st_uid}"
    return "others may write to it" if folder.stat().st_mode & (S_IWGRP | S_IWOTH) else None


def owned(*paths: Path) -> bool:
    """Whether all of these are the user's own: else somebody put them there while he could."""
    return all(path.lstat().st_uid == path.stat().st_uid == _user() for path in paths)


def _user() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # on Windows every file is user 0's


@lru_cache
def _warn(problem: str) -> None:
    log.warning(problem)  # once


def remembered(file: str) -> dict[str, Any]:
    """Everything in a file, by key."""
    folder = cache_folder()
    try:
        if folder is None or not owned(folder / file):
            return {}
        found = documents.read((folder / file).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def remember(file: str, key: str, value: Any) -> None:
    """Add to a file, atomically: another process sees it before or after, never half of it."""
    folder = cache_folder()
    try:
        if folder:
            content = json.dumps(remembered(file) | {key: value}).encode()
            files.write(folder / file, content, mode=0o600)
    except OSError:
        pass


def forget() -> None:
    """Remove every file of things found out once."""
    folder = cache_folder()
    for file in folder.glob("*.json") if folder else ():
        file.unlink(missing_ok=True)
