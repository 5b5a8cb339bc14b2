"""A cache of computed values: small JSON files in the user's cache folder; and the versions of the
libraries that stored results depend on.

A file that is missing, broken or cannot be written only means that the next process computes its
values again. Does not know what the values are.
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
    """Versions of the installed ones among `packages`; without any, of LIBRARIES."""
    installed: dict[str, str] = {}
    for name in packages or VERSIONED_LIBRARIES:
        with suppress(PackageNotFoundError):
            installed[name] = version(name)
    return installed


log = logging.getLogger(__name__)


def get_cache_folder() -> Path | None:
    """The system's folder for caches, `$XDG_CACHE_HOME/foretoken` or `~/.cache/foretoken` on Linux;
    without a home, a folder of the user's own among the temporary files. It is made with access for
    its owner alone.

    None where it cannot be made, or where other users could have written to it: converted models
    and measured costs are then not kept.
    """
    folder = _locate_folder()
    if problem := _prepare_folder(folder):
        _warn_once(problem)
    return None if problem else folder


def find_cache_problem() -> str | None:
    """Return why there is no cache folder, and the remedy; None where there is one."""
    return _prepare_folder(_locate_folder())


def _locate_folder() -> Path:
    try:
        return Path(user_cache_dir("foretoken", appauthor=False))
    except RuntimeError:  # there is no home
        return Path(tempfile.gettempdir()) / f"foretoken-{_get_user_id()}"


def _prepare_folder(folder: Path) -> str | None:
    """Make the folder, and return why it cannot be used."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        foreign_access = _find_foreign_access(folder)
    except OSError as error:
        reason = error.strerror or "no reason given"
        return f"{folder} cannot be used as a cache ({reason}); set XDG_CACHE_HOME to another"
    return foreign_access and (
        f"{folder} is not used as a cache, for {foreign_access}; remove it, and it is made anew "
        "for "
        "yourself alone, or set XDG_CACHE_HOME to another folder"
    )


def _find_foreign_access(folder: Path) -> str | None:
    """Why files in a folder may be another user's; None where they cannot be."""
    for status in (folder.lstat(), folder.stat()):  # of a link, too
        if status.st_uid != _get_user_id():
            return f"it belongs to user {status.st_uid}"
    return "others may write to it" if folder.stat().st_mode & (S_IWGRP | S_IWOTH) else None


def is_owned(*paths: Path) -> bool:
    """Tell whether all of these are the user's own: others may have been planted while the folder
    was open to all."""
    return all(path.lstat().st_uid == path.stat().st_uid == _get_user_id() for path in paths)


def _get_user_id() -> int:
    return os.geteuid() if hasattr(os, "geteuid") else 0  # on Windows every file is user 0's


@lru_cache
def _warn_once(problem: str) -> None:
    log.warning(problem)


def load_cached_values(file: str) -> dict[str, Any]:
    """All values in a file, by key."""
    folder = get_cache_folder()
    try:
        if folder is None or not is_owned(folder / file):
            return {}
        values = files.parse_json((folder / file).read_text())
    except (OSError, ValueError):
        return {}
    return values if isinstance(values, dict) else {}


def save_cached_value(file: str, key: str, value: Any) -> None:
    """Add to a file, atomically: another process sees it before or after, never half of it."""
    folder = get_cache_folder()
    try:
        if folder:
            content = json.dumps(load_cached_values(file) | {key: value}).encode()
            files.write_atomically(folder / file, content, mode=0o600)
    except OSError:
        pass


def clear_cached_values() -> None:
    """Remove every file of cached values, and tokenizers that GGUF files held."""
    folder = get_cache_folder()
    for file in folder.glob("*.json") if folder else ():
        file.unlink(missing_ok=True)
    if folder:
        shutil.rmtree(folder / "gguf", ignore_errors=True)
