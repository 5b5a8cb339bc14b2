"""Values outlive a process; a broken, locked or foreign folder is only an empty cache."""

from __future__ import annotations

import json
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from foretoken.storage.cache import get_cache_folder, load_cached_values, save_cached_value


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


def test_what_is_remembered_is_there_for_the_next_one() -> None:
    save_cached_value("a.json", "x", 1.5)
    save_cached_value("a.json", "y", [1, 2])
    assert load_cached_values("a.json") == {"x": 1.5, "y": [1, 2]}
    assert load_cached_values("b.json") == {}


def test_a_broken_file_is_an_empty_one(folder: Path) -> None:
    home = get_cache_folder()
    assert home is not None
    for text in ("{broken", "[1]", "", "[" * 100_000):
        (home / "a.json").write_text(text)
        assert load_cached_values("a.json") == {}
    save_cached_value("a.json", "x", 1)
    assert load_cached_values("a.json") == {"x": 1}


def test_no_reader_sees_half_a_file(folder: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: save_cached_value("a.json", str(i), "x" * 1000), range(40)))
    home = get_cache_folder()
    assert home is not None
    values = json.loads((home / "a.json").read_text())
    assert set(values.values()) == {"x" * 1000}
    assert [f.name for f in home.iterdir()] == ["a.json"]


def homeless(monkeypatch: pytest.MonkeyPatch, shared: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    monkeypatch.setattr("tempfile.tempdir", str(shared))


def test_without_a_home_it_is_a_folder_of_ones_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    homeless(monkeypatch, tmp_path)
    (tmp_path / "foretoken").mkdir()  # anybody's
    home = get_cache_folder()
    assert home == tmp_path / f"foretoken-{os.geteuid()}"
    assert stat.S_IMODE(home.stat().st_mode) == 0o700
    save_cached_value("a.json", "x", 1)
    assert load_cached_values("a.json") == {"x": 1}


def test_a_folder_that_cannot_be_made_is_told_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert get_cache_folder() is None and get_cache_folder() is None
    (said,) = caplog.messages
    assert said.startswith(f"{tmp_path / 'file' / 'foretoken'} cannot be used as a cache (Not a d")
    save_cached_value("a.json", "x", 1)
    assert load_cached_values("a.json") == {}


@pytest.mark.parametrize("home", [True, False])
def test_what_others_may_have_written_is_not_read(
    home: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    if not home:
        homeless(monkeypatch, tmp_path)
    save_cached_value("a.json", "x", 1)
    folder = get_cache_folder()
    assert folder is not None
    for mode in (0o770, 0o707):
        folder.chmod(mode)
        assert get_cache_folder() is None and load_cached_values("a.json") == {}
        save_cached_value("a.json", "x", 2)
        assert "others may write to it; remove the folder, and it is created again" in caplog.text
    folder.chmod(0o755)
    assert load_cached_values("a.json") == {"x": 1}


def test_another_users_folder_or_link_is_not_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    save_cached_value("a.json", "x", 1)
    other = os.geteuid() + 1
    monkeypatch.setattr("os.geteuid", lambda: other)
    assert get_cache_folder() is None and load_cached_values("a.json") == {}
    assert f"it belongs to user {os.stat(tmp_path).st_uid}" in caplog.text


def test_a_link_of_ones_own_may_lead_elsewhere(tmp_path: Path) -> None:
    (tmp_path / "large disk").mkdir(mode=0o700)
    (tmp_path / "foretoken").symlink_to(tmp_path / "large disk")
    save_cached_value("a.json", "x", 1)
    assert (
        load_cached_values("a.json") == {"x": 1} and (tmp_path / "large disk" / "a.json").exists()
    )


def test_what_somebody_else_left_in_the_folder_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """He could, before its owner closed it."""
    save_cached_value("a.json", "x", 1)
    folder = get_cache_folder()
    assert folder is not None and stat.S_IMODE((folder / "a.json").stat().st_mode) == 0o600
    if os.geteuid():
        pytest.skip("only root can give a file away")
    os.chown(folder / "a.json", 12345, -1)
    assert load_cached_values("a.json") == {}
    save_cached_value("a.json", "y", 2)
    assert load_cached_values("a.json") == {"y": 2}
