"""Files and folders that appear whole or not at all, and errors that name what could not be
written. Does not know what is in them.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from secrets import token_hex

from foretoken.errors import one_line


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """Whatever goes wrong within is an OSError that names `path` and the remedy."""
    try:
        yield
    except Exception as error:  # safetensors and tokenizers have their own for a full disk
        raise OSError(
            f"{path} cannot be written: {one_line(error)}; make room or allow it, and run it again"
        ) from error


def write(path: Path, content: bytes, mode: int = 0o666) -> None:
    """One file, beside its name first, which may be a link: it is replaced, not followed. `mode`:
    its permissions, less the process's umask. Raises OSError where it cannot be written."""
    part = path.with_name(f".{token_hex(8)}.part")  # threads and processes may write at once
    try:
        with naming(path):
            # x: never what somebody else has put there
            with open(part, "xb", opener=lambda path, flags: os.open(path, flags, mode)) as out:
                out.write(content)
            os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def folder(path: Path) -> Iterator[Path]:
    """A folder to write into, whose files are `path`'s once all are written. What stands there is
    as it was until then. Raises OSError where something cannot be written."""
    part = path.with_name(f"{path.name}.part")
    shutil.rmtree(part, ignore_errors=True)  # of a process that was killed
    try:
        with naming(path):
            part.mkdir()
            yield part
            _move(part, path)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def _move(part: Path, path: Path) -> None:
    if not path.exists():
        os.replace(part, path)
        return
    for file in sorted(part.rglob("*")):  # one by one: no kill leaves none
        place = path / file.relative_to(part)
        place.mkdir(exist_ok=True) if file.is_dir() else os.replace(file, place)
