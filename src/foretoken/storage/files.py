"""Files and folders that appear whole or not at all, errors that name what could not be written,
and JSON that others may have written. Does not know what the files mean.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex
from typing import IO, Any

from foretoken.errors import InputError, to_one_line

try:
    import fcntl
except ImportError:  # Windows has none
    fcntl = None


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Any error within becomes an OSError that names `path` and the remedy."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers have their own for a full disk
        if not path.parent.is_dir():
            folder = f"there is no folder {path.parent}; make it"
            raise OSError(f"{path} cannot be written: {folder}, and run it again") from error
        # An OSError's own text may name the file that would have been moved to `path`
        reason = (isinstance(error, OSError) and error.strerror) or to_one_line(error)
        raise OSError(
            f"{path} cannot be written: {reason}; make room or allow it, and run it again"
        ) from error


def write_atomically(
    path: Path, content: bytes | memoryview, mode: int = 0o666, part: Path | None = None
) -> None:
    """Write a file under another name beside `path`, then move it there: a link to a file is
    replaced, not followed. A device or a pipe is written to. Raises OSError, naming `path`.

    mode: permissions, less the umask. part: the other name, where one process alone writes: what it
    left there when it was killed is removed. None: a new one, as many may write at once.
    """
    if path.exists() and not path.is_file() and not path.is_dir():
        with name_path_in_errors(path), open(path, "wb") as device:
            device.write(content)
        return
    stale, part = part, part or path.with_name(f".{token_hex(8)}.part")
    try:
        with name_path_in_errors(path):
            if stale:
                stale.unlink(missing_ok=True)
            # x: never into a file or link that somebody else has put there
            with open(part, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                file.write(content)
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_text(file: Path, expected: str) -> str:
    """Read a file in UTF-8; InputError where it cannot be read. holds: what it should contain."""
    if not file.exists():
        raise InputError(f"{file} cannot be read: there is no such file; give one with {expected}")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as text in UTF-8: {error}") from None


def lock_file(file: IO[bytes], path: Path) -> None:
    """Let no other process lock a file that is open here, until it is closed; InputError where one
    has it."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another process writes to {path}; wait for it, or write to another place"
        ) from None


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """A folder to write into; its files move to `path` once all are written, and until then
    `path` is as it was. Raises OSError where something cannot be written."""
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        with name_path_in_errors(path):
            part.mkdir()
            yield part
            _move_files(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move_files(part: Path, path: Path) -> None:
    if not path.exists():
        os.replace(part, path)
        return
    for file in sorted(part.rglob("*")):  # one by one: a kill leaves every file, old or new
        destination = path / file.relative_to(part)
        destination.mkdir(exist_ok=True) if file.is_dir() else os.replace(file, destination)


def read_own_json(file: Path) -> Any:
    """The value in a file of JSON that was written here. Raises InputError for a damaged one."""
    try:
        return parse_json(file.read_text())
    except ValueError:
        raise InputError(f"{file} is damaged; remove it, and what it held is made anew") from None


def parse_json(text: str | bytes, **options: Any) -> Any:
    """The value of JSON that others may have written; ValueError where it cannot be read, also
    where it nests too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it nests too deeply") from None
