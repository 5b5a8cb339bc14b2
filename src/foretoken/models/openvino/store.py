"""Converted models on disk, in the user's cache folder, one folder each, named by what they were
made from.

A folder appears whole or not at all, whoever else writes at the same time; what cannot be read is
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
from foretoken.models.openvino.exported import Exported
from foretoken.storage.cache import cache_folder, owned, remember, remembered
from foretoken.storage.files import parse_json

FACTS = "facts.json"
MAKING = ".making-"  # what is being written, or was when a process died
STALE = 24 * 3600  # seconds after which nobody is writing any more
PIECE = 1 << 24  # bytes read at a time


@dataclass(frozen=True, slots=True)
class Entry:
    """One converted model on disk."""

    folder: Path
    name: str  # of the model it was made from
    dtype: str
    bytes: int
    made: float  # seconds since 1970


def folder() -> Path | None:
    """Where conversions are; None where nothing can be kept safely."""
    cache = cache_folder()
    return cache and cache / "converted"


def digest(files: list[Path]) -> str:
    """sha256 over names and contents; a file is read again only when its times or size changed."""
    total = hashlib.sha256()
    for file in sorted(files):
        found = file.stat()
        stamp = [found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns]
        key = ".".join(map(str, stamp))
        content = remembered("digests.json").get(key)
        if not isinstance(content, str):
            content = _content(file)
            remember("digests.json", key, content)
        total.update(f"{file.name} {content}\n".encode())
    return total.hexdigest()


def _content(file: Path) -> str:
    content = hashlib.sha256()
    with file.open("rb") as stream:
        while piece := stream.read(PIECE):
            content.update(piece)
    return content.hexdigest()


def find(key: str) -> Exported | None:
    """What was kept under `key`; its weights are read from disk as they are needed."""
    home = folder()
    if home is None:
        return None
    place = home / key
    try:
        known = _facts(place)
        if known["content"] != digest(_parts(place)):
            raise ValueError("its files are not those that were written")
        core = ov.Core()
        graphs = {name: core.read_model(place / f"{name}.xml") for name in known["graphs"]}
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        shutil.rmtree(place, ignore_errors=True)  # damaged, or never there
        return None
    except (OSError, RuntimeError):  # no memory, too many files: it may be whole
        return None
    return Exported(graphs, known)


def facts(key: str) -> dict[str, Any] | None:
    """What is known of what was kept under `key`, which may be damaged itself."""
    home = folder()
    try:
        return home and _facts(home / key)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _parts(place: Path) -> list[Path]:
    return [file for file in place.iterdir() if file.name != FACTS]


def _facts(place: Path) -> dict[str, Any]:
    """What is known of a kept model; ValueError where the file is not as it was written, or where
    any of it is somebody else's."""
    if not owned(place.parent, place, *place.iterdir()):
        raise ValueError("somebody else has written it")
    found = parse_json((place / FACTS).read_text())
    if found["seal"] != _seal(found["facts"]):
        raise ValueError("its facts are not those that were written")
    return found["facts"]


def _seal(facts: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()


def keep(key: str, exported: Exported, name: str, dtype: str) -> bool:
    """Write it, whole or not at all, in place of what older versions made of the same model; False
    where the disk has no room or cannot be written."""
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
        return (home / key / FACTS).exists()  # another process was first
    for entry in entries():
        if (entry.name, entry.dtype) == (name, dtype) and entry.folder.name != key:
            shutil.rmtree(entry.folder, ignore_errors=True)
    return True


def _sweep(home: Path) -> None:
    for place in home.glob(f"{MAKING}*"):
        if time.time() - place.stat().st_mtime > STALE:
            shutil.rmtree(place, ignore_errors=True)


def entries() -> list[Entry]:
    """All that is kept, newest first."""
    home, found = folder(), list[Entry]()
    for file in home.glob(f"*/{FACTS}") if home else ():
        try:
            facts = _facts(file.parent)
            size = sum(part.stat().st_size for part in file.parent.iterdir())
            found.append(Entry(file.parent, facts["name"], facts["dtype"], size, facts["made"]))
        except (OSError, ValueError, KeyError, TypeError):
            continue
    return sorted(found, key=lambda entry: -entry.made)


def clear() -> int:
    """Remove everything that is kept; returns the number of models. They are made again when they
    are next loaded."""
    home, count = folder(), len(entries())
    if home:
        shutil.rmtree(home, ignore_errors=True)
    return count
