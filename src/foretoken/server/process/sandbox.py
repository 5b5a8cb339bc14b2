"""A process of its own for work on data of clients: a few bytes may take hours or all memory, or
break a C library, and such work cannot be stopped. It ends itself if one answer takes too long.

Questions and answers are lines of JSON followed by bytes; the first line holds the settings.
"""

from __future__ import annotations

import faulthandler
import json
import os
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from io import BufferedReader
from threading import Lock
from typing import IO, Any, cast

from foretoken.errors import InputError

SECONDS = 10.0  # for an answer
BYTES = 4 * 2**30  # of its address space

Message = tuple[dict[str, Any], bytes]
Answers = Callable[[dict[str, Any], bytearray], Message]


class Sandbox:
    """`python -m MODULE`, which calls `answer`: it starts with the first question, and again after
    one that it could not answer. `task`, `remedy`: of an error."""

    def __init__(
        self, module: str, task: str, remedy: str, settings: Callable[[], dict[str, Any]] = dict
    ) -> None:
        self._module, self._task, self._remedy, self._settings = module, task, remedy, settings
        self._process: subprocess.Popen[bytes] | None = None
        self._lock = Lock()

    def ask(
        self, place: str, question: dict[str, Any], body: bytes = b""
    ) -> tuple[dict[str, Any], bytearray]:
        """Return its answer. Raises InputError about `place` if that takes more than `SECONDS` or
        `BYTES`, or breaks the process."""
        with self._lock:
            if self._process is None:
                self._process = self._started()
            process = self._process
            assert process.stdin is not None and process.stdout is not None
            try:
                _write(process.stdin, question, body)
                answer = _read(cast(BufferedReader, process.stdout))
            except OSError:
                answer = None
            if answer is None:
                self._end_process()
                limits = f"{SECONDS:g} s or {BYTES // 2**30} GB to {self._task}"
                raise InputError(f"{place} takes more than {limits}; {self._remedy}")
            return answer

    def close(self) -> None:
        """End the process, whatever it does."""
        process = self._process
        if process is not None:
            process.kill()  # before the lock, which waits for its answer
        with self._lock:
            self._end_process()

    def _started(self) -> subprocess.Popen[bytes]:
        process = subprocess.Popen(
            [sys.executable, "-m", self._module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        )
        assert process.stdin is not None
        _write(process.stdin, {**self._settings(), "limits": [SECONDS, BYTES]}, b"")
        return process

    def _end_process(self) -> None:
        if self._process is None:
            return
        self._process.kill()
        with suppress(OSError):  # bytes that it did not read
            self._process.__exit__(None, None, None)
        self._process = None


def answer(start: Callable[[dict[str, Any]], Answers]) -> None:
    """Run such a process: `start` makes of its settings a function that answers questions."""
    questions, answers = cast(BufferedReader, sys.stdin.buffer), os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # libraries may print, too
    first = _read(questions)
    assert first is not None
    (seconds, size), respond = first[0]["limits"], start(first[0])
    with suppress(ImportError, ValueError, OSError):  # not on Windows
        import resource

        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    while (question := _read(questions)) is not None:
        faulthandler.dump_traceback_later(seconds, exit=True)  # which needs no lock
        fields, body = respond(*question)
        faulthandler.cancel_dump_traceback_later()
        _write(answers, fields, body)


def _write(pipe: IO[bytes], fields: dict[str, Any], body: bytes) -> None:
    pipe.write(json.dumps({**fields, "bytes": len(body)}).encode() + b"\n")
    pipe.write(body)
    pipe.flush()


def _read(pipe: BufferedReader) -> tuple[dict[str, Any], bytearray] | None:
    """None if the other end is gone."""
    line = pipe.readline()
    if not line.endswith(b"\n"):
        return None
    fields = json.loads(line)
    body = bytearray(fields.pop("bytes"))  # read in place: it may be large
    return (fields, body) if pipe.readinto(body) == len(body) else None
