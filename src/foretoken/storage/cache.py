"""A cache of computed values in small JSON files in the user's cache folder, and the versions of
the libraries that stored results depend on.

If a file is missing, damaged or cannot be written, the next process computes its values again. Does
not depend on the meaning of the values.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import tempfile
from contextlib import suppress
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from stat import S_IWGRP, S_IWOTH
from typing import Any

from platformdirs import user_cache_dir

from foretoken.storage import files

VERSIONED_LIBRARIES = ("foretoken", "torch", "transformers")


@cache
def get_versions(*packages: str) -> dict[str, str]:
    """Return the versions of the installed `packages`, by default of VERSIONED_LIBRARIES."""
    installed: dict[str, str] = {}
    for name in packages or VERSIONED_LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


log = logging.getLogger(__name__)


def get_cache_folder() -> Path | None:
    """Return the folder for caches: `$XDG_CACHE_HOME/foretoken` or `~/.cache/foretoken` on Linux;
    if there is no home folder, a folder for this user in the temporary folder. The folder is
    created with access for its owner only.

    Returns None, with a warning, if the folder cannot be created or other users could write to it:
    converted models and measured costs are then not stored.
    """
    folder = _locate_folder()
    if problem := _prepare_folder(folder):
        _warn_once(problem)
    return None if problem else folder


def find_cache_problem() -> str | None:
    """Return why the cache folder cannot be used, with the remedy; None if it can be used."""
    return _prepare_folder(_locate_folder())


def _locate_folder() -> Path:
    try:
        return Path(user_cache_dir("foretoken", appauthor=False))
    except RuntimeError:  # no home folder
        return Path(tempfile.gettempdir()) / f"foretoken-{_get_user_id()}"


def _prepare_folder(folder: Path) -> str | None:
    """Create the folder. Return why the folder cannot be used; None if it can be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        foreign_access = _find_foreign_access(folder)
    except OSError as error:
        reason = error.strerror or "no reason given"
        return f"{folder} cannot be used as a cache ({reason}); set XDG_CACHE_HOME to another path"
    return foreign_access and (
        f"{folder} is not used as a cache, because {foreign_access}; remove the folder, and it is "
        "created again for you alone, or set XDG_CACHE_HOME to another folder"
    )


def _find_foreign_access(folder: Path) -> str | None:
    """Return why another user may have placed files in a folder: as its owner, or because others
    may write to it. None if no other user could write to it."""
    for status in (folder.lstat(), folder.stat()):  # of a symbolic link and of its target
        if status.st_uid != _get_user_id():
            return f"it belongs to user {status.st_uid}"
    return "others may write to it" if folder.stat().st_mode & (S_IWGRP | S_IWOTH) else None


def is_owned(*paths: Path) -> bool:
    """Return whether all of these files belong to the user: a file of another user may date from a
    time when the folder was writable for all."""
    return all(path.lstat().st_uid == path.stat().st_uid == _get_user_id() for path in paths)


def _get_user_id() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # Windows has no user ids


@lru_cache
def _warn_once(problem: str) -> None:
    log.warning(problem)


def load_cached_values(file: str) -> dict[str, Any]:
    """Return all values in the cache file named `file`, by key; {} if the file cannot be read or
    belongs to another user."""
    folder = get_cache_folder()
    try:
        if folder is None or not is_owned(folder / file):
            return {}
        values = files.parse_json((folder / file).read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def save_cached_value(file: str, key: str, value: Any) -> None:
    """Store a value under `key` in the cache file named `file`, if the file can be written. The
    file is replaced atomically: other processes see the old or the new file, never a part."""
    folder = get_cache_folder()
    try:
        if folder:
            content = json.dumps(load_cached_values(file) | {key: value}).encode()
            files.write_atomically(folder / file, content, mode=0o600)
    except OSError:
        pass


def clear_cached_values() -> None:
    """Remove all files of cached values, and the cached tokenizers of GGUF files."""
    folder = get_cache_folder()
    for file in folder.glob("*.json") if folder else ():
        file.unlink(missing_ok=True)
    if folder:
        shutil.rmtree(folder / "gguf", ignore_errors=True)
