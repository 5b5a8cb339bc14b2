"""The command line on a terminal of its own: what is typed, what it shows."""

from __future__ import annotations

import os
import pty
import select
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from time import monotonic, sleep

import foretoken

# The terminal becomes the process's own, so that Ctrl-C typed there reaches it
CALL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from foretoken.cli import main
main()
"""
CTRL_C, CTRL_D = "\x03", "\x04"


class Terminal:
    def __init__(self, master: int, process: subprocess.Popen[bytes]) -> None:
        self.master, self.process, self.shown = master, process, ""

    def type(self, keys: str) -> None:
        sleep(0.2)  # a signal between a prompt and the wait behind it would wait for the next key
        os.write(self.master, keys.encode())

    def until(self, text: str, seconds: float = 120) -> str:
        """What it shows up to this text, which must come."""
        end = monotonic() + seconds
        while text not in self.shown:
            seconds_left = end - monotonic()
            assert seconds_left > 0 and self.read(seconds_left), (
                f"{text!r} is not in {self.shown!r}"
            )
        before, _, self.shown = self.shown.partition(text)
        return before

    def code(self, seconds: float = 60) -> int:
        """The exit code, once it has ended."""
        end = monotonic() + seconds
        while self.process.poll() is None and monotonic() < end:
            self.read(0.1)
        return self.process.wait(1)

    def read(self, seconds: float) -> bool:
        """Whether it showed more, or still may."""
        if not select.select([self.master], [], [], seconds)[0]:
            return self.process.poll() is None
        try:
            self.shown += os.read(self.master, 65536).decode(errors="replace")
        except OSError:  # Linux: the other end is closed
            return False
        return True


@contextmanager
def terminal(*args: object, **environment: str) -> Iterator[Terminal]:
    """`foretoken` with arguments; killed where it does not end."""
    source = str(Path(foretoken.__file__).parents[1])
    settings = {"PYTHONPATH": source, "TERM": "xterm", "NO_PROXY": "127.0.0.1", **environment}
    master, slave = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", CALL, *map(str, args)],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=os.environ | settings,
        start_new_session=True,
    )
    os.close(slave)
    try:
        yield Terminal(master, process)
    finally:
        process.kill()
        process.wait()
        os.close(master)
