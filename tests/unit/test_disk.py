"""What outlives a process, and what a broken or locked folder does to it."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretoken.disk import cache_folder, remember, remembered


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_remembered_is_there_for_the_next_one() -> None:
    remember("a.json", "x", 1.5)
    remember("a.json", "y", [1, 2])
    assert remembered("a.json") == {"x": 1.5, "y": [1, 2]}
    assert remembered("b.json") == {}


def test_a_broken_file_is_an_empty_one(folder: Path) -> None:
    cache_folder().mkdir()
    for text in ("{broken", "[1]", ""):
        (cache_folder() / "a.json").write_text(text)
        assert remembered("a.json") == {}
    remember("a.json", "x", 1)
    assert remembered("a.json") == {"x": 1}


def test_a_folder_that_cannot_be_made_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder / "file"))
    remember("a.json", "x", 1)
    assert remembered("a.json") == {}


def test_no_reader_sees_half_a_file(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: remember("a.json", str(i), "x" * 1000), range(40)))
    found = json.loads((cache_folder() / "a.json").read_text())
    assert set(found.values()) == {"x" * 1000}
    assert [f.name for f in cache_folder().iterdir()] == ["a.json"]


def test_without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    assert not str(cache_folder()).startswith("~")
