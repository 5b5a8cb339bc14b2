"""Converted models on disk: whole or not at all, found by content, made again when damaged."""

from __future__ import annotations

import logging
import os
import re
import shutil
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from foretoken import slow_log
from foretoken.errors import RefusedError
from foretoken.models import store
from foretoken.models.store import StoredConversion
from served import until

WEIGHTS = "decoder.bin"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def written(value: float = 1.0) -> Callable[[Path], dict[str, Any]]:
    """Return a writer of a conversion whose weight is this."""

    def write(place: Path) -> dict[str, Any]:
        (place / WEIGHTS).write_text(str(value))
        (place / "decoder.xml").write_text("a graph")
        return {"form": "paged", "context": None}

    return write


def runs(loaded: StoredConversion) -> float:
    return float((loaded.folder / WEIGHTS).read_text())


def test_what_was_kept_is_found() -> None:
    assert store.find("k") is None
    assert store.save("k", written(3.0), "a model", "float32")
    loaded = store.find("k")
    assert loaded is not None and runs(loaded) == 3.0
    assert loaded.facts["form"] == "paged" and loaded.facts["context"] is None
    (entry,) = store.list_entries()
    assert (entry.name, entry.dtype) == ("a model", "float32") and entry.bytes > 0


def test_a_new_conversion_of_a_model_takes_the_place_of_the_old() -> None:
    store.save("a", written(1.0), "m", "float32")
    store.save("b", written(2.0), "m", "bfloat16")
    store.save("c", written(3.0), "m", "float32")
    assert {entry.folder.name for entry in store.list_entries()} == {"b", "c"}


def in_its_place(place: Path) -> None:
    shutil.rmtree(place)
    place.write_text("no folder")


def zeroed(place: Path) -> None:
    """As long as before."""
    (place / WEIGHTS).write_bytes(bytes((place / WEIGHTS).stat().st_size))


def other_facts(place: Path) -> None:
    facts = place / store.FACTS_FILE
    facts.write_text(facts.read_text().replace('"form": "paged"', '"form": "other"'))


DAMAGE: dict[str, Callable[[Path], object]] = {
    **{
        f"no {name}": lambda p, name=name: (p / name).unlink()
        for name in (store.FACTS_FILE, WEIGHTS)
    },
    "a folder in it": lambda place: (place / "a folder").mkdir(),
    "a file in its place": in_its_place,
    "bytes that changed": zeroed,
    "facts that changed": other_facts,
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_one_is_as_none(damage: str) -> None:
    store.save("k", written(), "m", "float32")
    DAMAGE[damage](store.get_folder() / "k")
    assert store.find("k") is None
    assert store.save("k", written(4.0), "m", "float32")
    loaded = store.find("k")
    assert loaded is not None and runs(loaded) == 4.0


@dataclass
class Weights:
    """A model's files."""

    file: Path
    name = "m"
    gguf = None
    adapter_files = ()

    @property
    def path(self) -> Path:
        return self.file

    def list_custom_code(self) -> list[str]:
        return []

    def list_files(self) -> list[Path]:
        return [self.file]


def test_a_slow_conversion_is_told_without_an_estimate(
    folder: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    caplog.set_level("INFO", "foretoken.models.store")
    source: Any = Weights(folder / "weights")
    assert store.find_or_convert(source, "fast", "int8", written())
    assert not caplog.messages
    monkeypatch.setattr(slow_log, "LOG_AFTER_SECONDS", 0.2)

    def write(place: Path) -> dict[str, Any]:
        until(lambda: caplog.messages)
        assert caplog.messages == ["converting m to int8 for the native decoder, once"]
        return written()(place)

    made = store.find_or_convert(source, "slow", "int8", write)
    assert made is not None and made == store.find_or_convert(source, "slow", "", write)
    assert len(caplog.messages) == 2
    assert re.fullmatch(r"converted m in \d+\.\d s", caplog.messages[1])


def test_one_that_cannot_be_kept_is_said(
    folder: Path,
    caplog: pytest.LogCaptureFixture,
    full_disk: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source: Any = Weights(folder / "weights")
    # those of commands that ran in this process write to files, which the disk has no room for
    monkeypatch.setattr(logging.getLogger("foretoken"), "handlers", [])
    with full_disk(10):
        assert store.find_or_convert(source, "k", "int8", written()) is None
    assert " could not be stored in" in caplog.text


def test_several_writers_at_once() -> None:
    with ThreadPoolExecutor(4) as pool:
        results = list(pool.map(lambda _: store.save("k", written(2.0), "m", "float32"), range(6)))
    assert all(results)
    loaded = store.find("k")
    assert loaded is not None and runs(loaded) == 2.0
    assert [place.name for place in store.get_folder().iterdir()] == ["k"]


def test_what_a_dead_process_left_is_swept() -> None:
    partial = store.get_folder() / f"{store.TEMPORARY_PREFIX}old"
    fresh = store.get_folder() / f"{store.TEMPORARY_PREFIX}new"
    partial.mkdir(parents=True)
    fresh.mkdir()
    long_ago = time.time() - 2 * store.STALE_SECONDS
    os.utime(partial, (long_ago, long_ago))
    store.save("k", written(), "m", "float32")
    assert not partial.exists() and fresh.exists()


def test_a_disk_that_cannot_be_written(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    assert not store.save("k", written(), "m", "float32")
    assert store.find("k") is None and store.list_entries() == [] and store.clear() == 0


def test_clear() -> None:
    store.save("a", written(), "m", "float32")
    store.save("b", written(), "n", "float32")
    assert store.clear("o") == 0
    assert store.clear("m") == 1
    assert [entry.name for entry in store.list_entries()] == ["n"]
    assert store.clear() == 1
    assert store.list_entries() == []


def test_a_digest_is_of_names_and_contents(folder: Path) -> None:
    one, two = folder / "one", folder / "two"
    one.write_bytes(b"weights")
    two.write_bytes(b"more")
    first = store.compute_digest([one, two])
    assert store.compute_digest([two, one]) == first
    stamp = one.stat()
    one.write_bytes(b"weightz")  # as large, and with the old times
    os.utime(one, ns=(stamp.st_atime_ns, stamp.st_mtime_ns))
    assert store.compute_digest([one, two]) != first
    one.write_bytes(b"weights")
    assert store.compute_digest([one, two]) == first
    two.rename(folder / "three")
    assert store.compute_digest([one, folder / "three"]) != first


def test_a_passing_failure_does_not_cost_the_conversion(monkeypatch: pytest.MonkeyPatch) -> None:
    def failing(*args: object) -> None:
        raise OSError(24, "too many open files")

    store.save("k", written(3.0), "m", "float32")
    with monkeypatch.context() as patch:
        patch.setattr(store, "compute_digest", failing)
        assert store.find("k") is None
    loaded = store.find("k")
    assert loaded is not None and runs(loaded) == 3.0


def test_a_refusal_while_writing_is_raised_and_leaves_nothing() -> None:
    def refuse(place: Path) -> dict[str, Any]:
        (place / WEIGHTS).write_text("half")
        raise RefusedError("a family of another kind")

    with pytest.raises(RefusedError, match="another kind"):
        store.save("k", refuse, "m", "float32")
    home = store.get_folder()
    assert home is not None and [*home.iterdir()] == []


def test_without_a_safe_folder_nothing_is_kept(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    assert store.save("k", written(), "m", "float32")
    (folder / "foretoken").chmod(0o777)
    assert store.get_folder() is None and store.find("k") is None and store.list_entries() == []
    assert not store.save("j", written(), "m", "float32") and store.clear() == 0
    assert "others may write to it" in caplog.text
    (folder / "foretoken").chmod(0o700)
    assert store.find("k") is not None


@pytest.mark.parametrize("planted", ["", "k", "k/decoder.bin", "k/facts.json"])
def test_what_somebody_else_put_there_is_not_run(planted: str) -> None:
    store.save("k", written(3.0), "m", "float32")
    home = store.get_folder()
    assert home is not None
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(home / planted, 12345, -1)
    assert store.load_facts("k") is None and store.find("k") is None
