"""Converted models on disk, in the user's cache folder, one folder each, named by a digest of what
they were made from.

A folder appears whole or not at all, even if several processes write it; one that cannot be read is
made again. It does not know how models are converted or run.
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
from foretoken.errors import RefusedError, base_name
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
TEMPORARY_PREFIX = ".making-"  # prefix of folders being written, or left by a process that died
STALE_SECONDS = 24 * 3600  # seconds; older ones were left
# Raised by a conversion that is missing or is not as it was written
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
    name: str  # of the model it was made from
    dtype: str
    bytes: int
    made: float  # seconds since 1970


def get_folder() -> Path | None:
    """Where conversions are kept; None where it cannot be done safely."""
    cache = get_cache_folder()
    return cache and cache / "converted"


def compute_digest(files: list[Path]) -> str:
    """sha256 over names and contents; a file is read again only when its times or size changed."""
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
    """A conversion on disk, whole."""

    folder: Path
    facts: dict[str, Any]


def find(key: str) -> StoredConversion | None:
    """The conversion kept under `key`, whose files are those that were written."""
    home = get_folder()
    if home is None:
        return None
    path = home / key
    try:
        facts = _read_facts(path)
        if facts["content"] != compute_digest(_list_data_files(path)):
            raise ValueError("its files are not those that were written")
    except DAMAGE_ERRORS:
        if path.is_dir():
            shutil.rmtree(path, ignore_errors=True)
        else:
            with suppress(OSError):
                path.unlink()
        return None
    except OSError:  # too many open files: it may be whole
        return None
    return StoredConversion(path, facts)


def load_facts(key: str) -> dict[str, Any] | None:
    """The facts of the conversion kept under `key`, whose graphs may be damaged."""
    home = get_folder()
    try:
        return home and _read_facts(home / key)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _list_data_files(path: Path) -> list[Path]:
    return [file for file in path.iterdir() if file.name != FACTS_FILE]


def _read_facts(path: Path) -> dict[str, Any]:
    """The facts in a folder; ValueError if they were changed since, or if any file in it belongs to
    another user."""
    if not is_owned(path.parent, path, *path.iterdir()):
        raise ValueError("another user has written it")
    document = parse_json((path / FACTS_FILE).read_text())
    if document["seal"] != _compute_seal(document["facts"]):
        raise ValueError("its facts are not those that were written")
    return document["facts"]


def _compute_seal(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def save(key: str, write: Callable[[Path], dict[str, Any]], name: str, dtype: str) -> bool:
    """Let `write` put a conversion's files into a folder and return the facts, whole or not at all,
    in place of older conversions of the same model; False where the disk is full or cannot be
    written."""
    # Not by files.folder: its `.part` has one name, and several processes may write one key at once
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
        return (home / key / FACTS_FILE).exists()  # of a process that was faster
    for entry in list_entries():
        if (entry.name, entry.dtype) == (name, dtype) and entry.folder.name != key:
            shutil.rmtree(entry.folder, ignore_errors=True)
    return True


class ConversionSource(Protocol):
    """A model that is still on disk."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

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
    """Return the conversion kept under `key`, or make it by `write` and keep it, saying so; None
    where it cannot be kept, which is said too."""
    if found := find(key):
        return found
    name, start = base_name(source.name), time.perf_counter()
    with log_if_slow(log, "converting %s to %s for the native decoder, once", name, form):
        saved = save(key, write, get_title(source), form)
    seconds = time.perf_counter() - start
    if seconds > slow_log.LOG_AFTER_SECONDS:
        log_visibly(log, "converted %s in %.1f s", name, seconds)
    if not saved:
        where = get_folder() or "a cache folder"
        log.warning("it could not be kept in %s and is made again each time", where)
    return find(key) if saved else None


def compute_key(source: ConversionSource, *choices: str | int) -> str:
    """The key under which a conversion is kept: a digest of the model, of these choices, among them
    the form and its format, and of versions."""
    files = source.list_files()
    if files is None and source.commit is None:
        raise RefusedError(f"no commit of {source.name} is known to keep a conversion under")
    if files is None:
        changes = [compute_digest(source.adapter_files)] if source.adapter_files else []
        content = " ".join([source.name, str(source.commit), *changes])
    else:
        content = compute_digest(files)
    parts = json.dumps([content, [*choices, *source.list_custom_code()], get_versions()])
    return hashlib.sha256(parts.encode()).hexdigest()[:32]


def get_title(source: ConversionSource) -> str:
    """The name of a conversion in lists: another of the same name and choices replaces it."""
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
    """All that is kept, newest first."""
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
    """Remove all conversions, or those of one model, which are made again when next loaded;
    returns their number."""
    home, found = (
        get_folder(),
        [each for each in list_entries() if name is None or each.name == name],
    )
    for entry in found:
        shutil.rmtree(entry.folder, ignore_errors=True)
    if home and name is None:  # what cannot be read, too
        shutil.rmtree(home, ignore_errors=True)
    return len(found)
