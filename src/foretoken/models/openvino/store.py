"""Converted models on disk, in the user's cache folder, one folder each, named by a digest of what
they were made from.

A folder appears whole or not at all, even if several processes write it; one that cannot be read is
made again. It does not know how models are converted or run.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import openvino as ov

from foretoken.models.openvino.tracing import Exported, core
from foretoken.storage.cache import cache_folder, owned, remember, remembered
from foretoken.storage.files import parse_json, write

FACTS, CARD = "facts.json", "card.json"
MAKING = ".making-"  # prefix of folders being written, or left by a process that died
STALE = 24 * 3600  # seconds; older ones were left


@dataclass(frozen=True, slots=True)
class Entry:
    """One converted model on disk."""

    folder: Path
    name: str  # of the model it was made from
    dtype: str
    bytes: int
    made: float  # seconds since 1970
    card: dict[str, Any] | None = None  # as `keep_card` wrote it


def folder() -> Path | None:
    """Where conversions are kept; None where it cannot be done safely."""
    cache = cache_folder()
    return cache and cache / "converted"


def digest(files: list[Path]) -> str:
    """sha256 over names and contents; a file is read again only when its times or size changed."""
    total = hashlib.sha256()
    for file in sorted(files):
        stat = file.stat()
        stamp = (stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns)
        key = ".".join(map(str, stamp))
        content = remembered("digests.json").get(key)
        if not isinstance(content, str):
            content = _content(file)
            remember("digests.json", key, content)
        total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


def _content(file: Path) -> str:
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def find(key: str) -> Exported | None:
    """The conversion kept under `key`; its weights are read from disk as they are needed."""
    home = folder()
    if home is None:
        return None
    place = home / key
    try:
        facts = _facts(place)
        if facts["content"] != digest(_parts(place)):
            raise ValueError("its files are not those that were written")
        graphs = {name: core().read_model(place / f"{name}.xml") for name in facts["graphs"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        shutil.rmtree(place, ignore_errors=True)  # damaged, or missing
        return None
    except (OSError, RuntimeError):  # no memory, too many open files: it may be whole
        return None
    return Exported(graphs, facts)


def facts(key: str) -> dict[str, Any] | None:
    """The facts of the conversion kept under `key`, whose graphs may be damaged."""
    home = folder()
    try:
        return home and _facts(home / key)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parts(place: Path) -> list[Path]:
    return [file for file in place.iterdir() if file.name not in (FACTS, CARD)]


def _facts(place: Path) -> dict[str, Any]:
    """The facts in a folder; ValueError if they were changed since, or if any file in it belongs to
    another user."""
    if not owned(place.parent, place, *place.iterdir()):
        raise ValueError("another user has written it")
    document = parse_json((place / FACTS).read_text())
    if document["seal"] != _seal(document["facts"]):
        raise ValueError("its facts are not those that were written")
    return document["facts"]


def _seal(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def keep(key: str, exported: Exported, name: str, dtype: str) -> bool:
    """Write a conversion, whole or not at all, in place of older ones of the same model; False
    where the disk is full or cannot be written."""
    # Not by files.folder: its `.part` has one name, and several processes may write one key at once
    facts: dict[str, Any] = {**exported.facts, "graphs": list(exported.graphs)}
    facts |= {"name": name, "dtype": dtype, "made": time.time()}
    home, making = folder(), None
    if home is None:
        return False
    try:
        home.mkdir(exist_ok=True)
        _sweep(home)
        making = Path(tempfile.mkdtemp(prefix=MAKING, dir=home))
        for part, graph in exported.graphs.items():
            ov.save_model(graph, making / f"{part}.xml", compress_to_fp16=False)
        facts["content"] = digest(_parts(making))
        (making / FACTS).write_text(json.dumps({"facts": facts, "seal": _seal(facts)}))
        os.replace(making, home / key)
    except (OSError, RuntimeError):
        if making:
            shutil.rmtree(making, ignore_errors=True)
        return (home / key / FACTS).exists()  # of a process that was faster
    for entry in entries():
        if (entry.name, entry.dtype) == (name, dtype) and entry.folder.name != key:
            shutil.rmtree(entry.folder, ignore_errors=True)
    return True


def keep_card(key: str, card: dict[str, Any]) -> bool:
    """Write what is to be known of the conversion under `key` into its folder; False where it is
    not kept, or cannot be written."""
    home = folder()
    if home is None or facts(key) is None:
        return False
    try:
        write(home / key / CARD, json.dumps(card, allow_nan=False).encode(), mode=0o600)
    except OSError:
        return False
    return True


def _card(place: Path) -> dict[str, Any] | None:
    """Return the card in a folder; None where there is none that can be read."""
    try:
        card = parse_json((place / CARD).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return card if isinstance(card, dict) else None


def _sweep(home: Path) -> None:
    for place in home.glob(f"{MAKING}*"):
        if time.time() - place.stat().st_mtime > STALE:
            shutil.rmtree(place, ignore_errors=True)


def entries() -> list[Entry]:
    """All that is kept, newest first."""
    home, listed = folder(), list[Entry]()
    for file in home.glob(f"*/{FACTS}") if home else ():
        try:
            facts = _facts(file.parent)
            size = sum(part.stat().st_size for part in file.parent.iterdir())
            about = facts["name"], facts["dtype"], size, facts["made"]
            listed.append(Entry(file.parent, *about, _card(file.parent)))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(listed, key=lambda entry: -entry.made)


def clear() -> int:
    """Remove all conversions, which are made again when next loaded; returns their number."""
    home, count = folder(), len(entries())
    if home:
        shutil.rmtree(home, ignore_errors=True)
    return count
