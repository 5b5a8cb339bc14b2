"""A file or folder is as it was until all of it is written; errors name it; foreign JSON."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from foretoken.errors import InputError
from foretoken.storage import files


def contents(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def fill(folder: Path, word: str) -> None:
    with files.replace_folder(folder) as part:
        (part / "below").mkdir()
        for name in ("a", "below/b"):
            (part / name).write_text(word)


def test_a_folder_is_new_or_gets_the_new_files(tmp_path):
    fill(tmp_path / "model", "old")
    (tmp_path / "model" / "notes").write_text("one's own")
    fill(tmp_path / "model", "new")
    assert contents(tmp_path) == {
        "model/a": b"new", "model/below/b": b"new", "model/notes": b"one's own"
    }  # fmt: skip
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize("error", [RuntimeError("no\nroom"), KeyboardInterrupt()])
def test_a_folder_that_is_not_finished_leaves_the_old_one(tmp_path, error):
    fill(tmp_path / "model", "old")
    before = contents(tmp_path)
    kind = OSError if isinstance(error, Exception) else KeyboardInterrupt
    with pytest.raises(kind) as raised, files.replace_folder(tmp_path / "model") as part:
        (part / "a").write_text("new")
        raise error
    assert contents(tmp_path) == before and [p.name for p in tmp_path.iterdir()] == ["model"]
    if kind is OSError:
        assert str(raised.value).startswith(
            f"{tmp_path / 'model'} cannot be written: no room; free"
        )


def test_what_a_kill_left_is_swept(tmp_path):
    (tmp_path / "model.part").mkdir()
    (tmp_path / "model.part" / "half").touch()
    fill(tmp_path / "model", "new")
    assert contents(tmp_path).keys() == {"model/a", "model/below/b"}


def test_a_file_that_cannot_be_written_is_named(tmp_path, full_disk):
    files.write_atomically(tmp_path / "a", b"old")
    with full_disk(10), pytest.raises(OSError, match="a cannot be written: .*too large"):
        files.write_atomically(tmp_path / "a", b"x" * 99)
    assert contents(tmp_path) == {"a": b"old"}


def test_a_planted_link_is_replaced_and_not_followed(tmp_path, monkeypatch):
    """Neither the file's own name nor that of the part in work leads elsewhere."""
    secret = tmp_path / "secret"
    secret.write_text("kept")
    (tmp_path / "a").symlink_to(secret)
    files.write_atomically(tmp_path / "a", b"new")
    assert secret.read_text() == "kept" and contents(tmp_path) == {"secret": b"kept", "a": b"new"}
    monkeypatch.setattr(files, "token_hex", lambda count: "guessed")
    (tmp_path / ".guessed.part").symlink_to(secret)
    with pytest.raises(OSError, match="a cannot be written: .*File exists"):
        files.write_atomically(tmp_path / "a", b"newer")
    assert secret.read_text() == "kept" and (tmp_path / "a").read_bytes() == b"new"


def test_json_of_others():
    assert files.parse_json(b'{"a": [1, NaN]}', parse_constant=str) == {"a": [1, "NaN"]}
    for text in ("{broken", "", "[" * 100_000):
        with pytest.raises(ValueError):
            files.parse_json(text)
    with pytest.raises(ValueError, match="^it is nested too deeply$"):
        files.parse_json("[" * 100_000)


def test_a_device_or_pipe_is_written_to_and_stays_one(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    reader = os.open(tmp_path / "pipe", os.O_RDONLY | os.O_NONBLOCK)
    (tmp_path / "link").symlink_to("pipe")
    for path in (tmp_path / "pipe", tmp_path / "link"):
        files.write_atomically(path, b"hello")
        assert os.read(reader, 9) == b"hello" and path.is_fifo()
    os.close(reader)
    files.write_atomically(Path("/dev/null"), b"hello")
    assert Path("/dev/null").is_char_device()


def test_text_without_its_mark(tmp_path):
    file = tmp_path / "a.txt"
    file.write_bytes("\ufeffsea\r\n".encode())
    assert files.read_text(file, "prompts") == "sea\r\n"


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(InputError, match="no such file"):
        files.read_text(tmp_path / "no", "a schema")
    with pytest.raises(InputError, match="cannot be read: it is a folder; give a file with a sch"):
        files.read_text(tmp_path, "a schema")
    (tmp_path / "b").write_bytes(b"\xff")
    with pytest.raises(InputError, match="cannot be read as UTF-8 text"):
        files.read_text(tmp_path / "b", "a schema")
