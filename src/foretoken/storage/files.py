"""Writes files and folders completely or not at all, with errors that name the path, and parses
untrusted JSON. Does not depend on what the files contain."""

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
except ImportError:  # on Windows
    fcntl = None


@contextmanager
def name_path_in_errors(path: Path) -> Iterator[None]:
    """Convert any exception in this context, which writes to `path`, to an OSError that names the
    path and the remedy."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers raise other types for a full disk
        if not path.parent.is_dir():
            folder = f"there is no folder {path.parent}; make that folder"
            raise OSError(f"{path} cannot be written: {folder}, and try again") from error
        # An OSError's own message may name the temporary file
        reason = (isinstance(error, OSError) and error.strerror) or to_one_line(error)
        raise OSError(
            f"{path} cannot be written: {reason}; free space or grant access, and try again"
        ) from error


def write_atomically(
    path: Path, content: bytes | memoryview, mode: int = 0o666, part: Path | None = None
) -> None:
    """Write a temporary file next to `path`, then rename it to `path`. A symbolic link is replaced,
    not followed; a device or a pipe is written to directly. Raises OSError that names `path`.

    Args:
        path: The file.
        content: Its bytes.
        mode: Permissions, less the umask.
        part: Path of the temporary file, if only one process writes `path`: a file that a killed
            process left there is removed first. None: a random path, for several writers.
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
            # x: never write into a file or link that another user has placed there
            with open(part, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as file:
                file.write(content)
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read_text(file: Path, expected: str) -> str:
    """Return a file's content as UTF-8 text. If the file cannot be read, raises InputError, which
    names the `expected` content."""
    if not file.exists() or file.is_dir():
        why = "it is a folder" if file.is_dir() else "there is no such file"
        raise InputError(f"{file} cannot be read: {why}; give a file with {expected}")
    try:
        return file.read_bytes().decode("utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as UTF-8 text: {error}") from None


def lock_file(file: IO[bytes], path: Path) -> None:
    """Lock an open file against other processes until it is closed. Raises InputError if another
    process holds the lock. Does nothing on Windows."""
    if fcntl is None:
        return
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise InputError(
            f"another process writes to {path}; wait for that process, or write to another path"
        ) from None


@contextmanager
def replace_folder(path: Path) -> Iterator[Path]:
    """Yield a folder to write into. At the end of the `with` block its files are moved to `path`,
    which is unchanged until then. Raises OSError if a file cannot be written."""
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # left by a process that was killed
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
    for file in sorted(part.rglob("*")):  # one by one: after a kill, no file is half written
        destination = path / file.relative_to(part)
        destination.mkdir(exist_ok=True) if file.is_dir() else os.replace(file, destination)


def read_own_json(file: Path) -> Any:
    """Return the value in foretoken's own JSON file. Raises InputError if the file is damaged."""
    try:
        return parse_json(file.read_text())
    except ValueError:
        raise InputError(f"{file} is damaged; remove the file, and it is computed again") from None


def parse_json(text: str | bytes, **options: Any) -> Any:
    """Return the value of untrusted JSON. Raises ValueError if invalid or nested too deeply."""
    try:
        return json.loads(text, **options)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
