"""Converted models on disk. Each model has a folder in the user's cache folder; the folder's name
is a digest of the model and the kind of conversion.

A folder is created atomically, even if several processes write it; a damaged folder is removed, and
its model is converted again. This module does not depend on how models are converted or run.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from foretoken import slow_log
from foretoken.errors import RefusedError, get_base_name
from foretoken.slow_log import log_if_slow, log_visibly
from foretoken.storage.cache import (
    get_cache_folder,
    get_versions,
    is_owned,
    load_cached_values,
    save_cached_value,
)
from foretoken.storage.files import parse_json

FACTS_FILE = "facts.json"
TEMPORARY_PREFIX = ".making-"  # of folders that are being written, or that a killed process left
STALE_SECONDS = 24 * 3600  # older temporary folders are removed
# Raised if a conversion is missing or has been changed
DAMAGE_ERRORS = (
    FileNotFoundError,
    IsADirectoryError,
    NotADirectoryError,
    ValueError,
    KeyError,
    TypeError,
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ConversionEntry:
    """One converted model on disk."""

    folder: Path
    name: str  # of the original model
    dtype: str
    bytes: int
    made: float  # seconds since 1970


def get_folder() -> Path | None:
    """Return the folder of conversions; None if there is no safe cache folder."""
    cache = get_cache_folder()
    return cache and cache / "converted"


def compute_digest(files: list[Path]) -> str:
    """Return the sha256 of the files' names and contents. The digest of a file's content is saved,
    and the file is read again only if its size or times have changed."""
    total = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        key = ".".join(map(str, stamp))
        content = load_cached_values("digests.json").get(key)
        if not isinstance(content, str):
            content = _hash_content(file)
            save_cached_value("digests.json", key, content)
        total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


def _hash_content(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


class StoredConversion(NamedTuple):
    """A complete conversion on disk: its folder, and the description that was stored with it."""

    folder: Path
    facts: dict[str, Any]


def find(key: str) -> StoredConversion | None:
    """Return the conversion stored under `key` after checking its files; None if there is none. A
    damaged conversion is removed."""
    home = get_folder()
    if home is None:
        return None
    path = home / key
    try:
        facts = _read_facts(path)
        if facts["content"] != compute_digest(_list_data_files(path)):
            raise ValueError("its files have changed since they were written")
    except DAMAGE_ERRORS:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
        return None
    except OSError:  # for instance too many open files: the conversion may be undamaged
        return None
    return StoredConversion(path, facts)


def load_facts(key: str) -> dict[str, Any] | None:
    """Return the description (`facts`) of the conversion stored under `key`, without checking its
    other files; None if there is none."""
    home = get_folder()
    try:
        return home and _read_facts(home / key)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _list_data_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.name != FACTS_FILE]


def _read_facts(path: Path) -> dict[str, Any]:
    """Return the description (`facts`) in a folder. Raises ValueError if the description has
    changed since it was written, or if any file of the folder belongs to another user."""
    if not is_owned(path.parent, path, *path.iterdir()):
        raise ValueError("another user has written it")
    document = parse_json((path / FACTS_FILE).read_text())
    if document["seal"] != _compute_seal(document["facts"]):
        raise ValueError("its facts have changed since they were written")
    return document["facts"]


def _compute_seal(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def save(key: str, write: Callable[[Path], dict[str, Any]], name: str, dtype: str) -> bool:
    """Store a conversion atomically and remove older conversions of the same model. Returns whether
    the conversion is stored: False if the disk is full or not writable.

    key: The name of the conversion's folder, from `compute_key`.
    write: Writes the files into a folder and returns their description (`facts`).
    name, dtype: The model's name in lists, from `get_title`, and the conversion's dtype.
    """
    # not by files.folder: its `.part` has a fixed name, but several processes may write one key
    home, temporary = get_folder(), None
    if home is None:
        return False
    try:
        home.mkdir(exist_ok=True)
        _remove_stale(home)
        temporary = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=home))
        facts = write(temporary) | {"name": name, "dtype": dtype, "made": time.time()}
        facts["content"] = compute_digest(_list_data_files(temporary))
        (temporary / FACTS_FILE).write_text(
            json.dumps({"facts": facts, "seal": _compute_seal(facts)})
        )
        os.replace(temporary, home / key)
    except BaseException as error:
        if temporary:
            shutil.rmtree(temporary, ignore_errors=True)
        if not isinstance(error, OSError | RuntimeError):
            raise
        return (home / key / FACTS_FILE).exists()  # True if another process was faster
    for entry in list_entries():
        if (entry.name, entry.dtype) == (name, dtype) and entry.folder.name != key:
            shutil.rmtree(entry.folder, ignore_errors=True)
    return True


class ConversionSource(Protocol):
    """A model on disk, before it is loaded."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def part(self) -> str:
        """The part of the files that is converted, for lists; "": the whole model."""
        ...

    @property
    def gguf(self) -> Path | None: ...

    def list_files(self) -> list[Path] | None: ...

    @property
    def adapter_files(self) -> list[Path]: ...

    @property
    def commit(self) -> str | None: ...

    def list_custom_code(self) -> list[str]: ...


def find_or_convert(
    source: ConversionSource, key: str, form: str, write: Callable[[Path], dict[str, Any]]
) -> StoredConversion | None:
    """Return the conversion stored under `key`; if there is none, make and store one with `write`.
    Logs a slow conversion. If storing fails, logs a warning and returns None.

    form: The target format, for the log and for lists.
    write: As in `save`.
    """
    if found := find(key):
        return found
    name, start = get_base_name(source.name), time.perf_counter()
    with log_if_slow(log, "converting %s to %s for the native decoder, once", name, form):
        saved = save(key, write, get_title(source), form)
    seconds = time.perf_counter() - start
    if seconds > slow_log.LOG_AFTER_SECONDS:
        log_visibly(log, "converted %s in %.1f s", name, seconds)
    if not saved:
        folder = get_folder() or "a cache folder"
        log.warning("%s could not be stored in %s; each start converts it again", name, folder)
    return find(key) if saved else None


def compute_key(source: ConversionSource, *choices: str | int) -> str:
    """Return the key of a conversion: a digest of the model's files or commit, of its custom code,
    of `choices` (the kind and format version of the conversion and the like), and of the versions
    of the libraries. Raises RefusedError if the model's commit is unknown."""
    files = source.list_files()
    if files is None and source.commit is None:
        raise RefusedError(
            f"the commit of {source.name} is unknown, so its conversion cannot be stored"
        )
    if files is None:
        changes = [compute_digest(source.adapter_files)] if source.adapter_files else []
        content = " ".join([source.name, str(source.commit), *changes])
    else:
        content = compute_digest(files)
    parts = json.dumps([content, [*choices, *source.list_custom_code()], get_versions()])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def get_title(source: ConversionSource) -> str:
    """Return the name of a conversion in lists. A new conversion with the same name and dtype
    replaces the old one."""
    local = source.gguf or Path(source.path)
    name = source.name if source.list_files() is None else str(local.resolve())
    return name + (
        f" with {source.adapter_files[0].parent.resolve()}" if source.adapter_files else ""
    )


def _remove_stale(home: Path) -> None:
    for path in home.glob(f"{TEMPORARY_PREFIX}*"):
        if time.time() - path.stat().st_mtime > STALE_SECONDS:
            shutil.rmtree(path, ignore_errors=True)


def list_entries() -> list[ConversionEntry]:
    """Return all stored conversions, the newest first."""
    home, listed = get_folder(), list[ConversionEntry]()
    for file in home.glob(f"*/{FACTS_FILE}") if home else ():
        try:
            facts = _read_facts(file.parent)
            size = sum(part.stat().st_size for part in file.parent.iterdir())
            listed.append(
                ConversionEntry(file.parent, facts["name"], facts["dtype"], size, facts["made"])
            )
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(listed, key=lambda entry: -entry.made)


def clear(name: str | None = None) -> int:
    """Remove all stored conversions, or the conversions of the model `name`; return the number
    removed. A model is converted again when it is next loaded."""
    home, found = (
        get_folder(),
        [each for each in list_entries() if name is None or each.name == name],
    )
    for entry in found:
        shutil.rmtree(entry.folder, ignore_errors=True)
    if home and name is None:  # damaged conversions too, which are not listed
        shutil.rmtree(home, ignore_errors=True)
    return len(found)
