"""A server in a process of its own, for as long as it is measured."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from time import monotonic, sleep
from urllib.error import URLError
from urllib.request import urlopen

LOADING, ENDING = 900.0, 60.0  # seconds until it answers, and until it is gone


@dataclass(frozen=True, slots=True)
class Process:
    """Where it listens, and its process group."""

    url: str
    group: int

    @contextmanager
    def alone(self, others: Sequence[Process]) -> Generator[None]:
        """The others stand still meanwhile: an idle server may poll."""
        rest = [other.group for other in others if other.group != self.group]
        for group in rest:
            os.killpg(group, signal.SIGSTOP)
        try:
            yield
        finally:
            for group in rest:
                os.killpg(group, signal.SIGCONT)


def foretoken(target: str | None, draft: str | None, dtype: str, *more: str) -> list[str]:
    """The command that serves a pair, but for its port; without a target the one that ships."""
    pair = [] if target is None else [target]
    pair += [] if draft is None else ["--draft", draft]
    serve = [sys.executable, "-m", "foretoken", "serve", *pair, "--dtype", dtype]
    return [*serve, "--log-level", "warning", *more, "--port"]


@contextmanager
def started(
    command: list[str], health: str = "/ready", environment: Mapping[str, str] | None = None
) -> Generator[Process]:
    """`command` and a free port, once `health` answers 200; ended behind the block. RuntimeError,
    with what it printed last, where it ends before that or never answers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the server ends too
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with TemporaryFile() as printed:
        process = subprocess.Popen(
            [*command, str(port)],
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env=os.environ | dict(environment or {}),
        )
        try:
            url = f"http://127.0.0.1:{port}"
            if not _answers(url + health, process):
                printed.seek(0)
                output = printed.read().decode(errors="replace")[-2000:]
                raise RuntimeError(f"{Path(command[0]).name} does not serve: {output}")
            yield Process(url, process.pid)
        finally:
            _end(process)


def _answers(url: str, process: subprocess.Popen[bytes]) -> bool:
    end = monotonic() + LOADING
    while process.poll() is None and monotonic() < end:
        try:
            with urlopen(url, timeout=10) as response:
                if response.status == 200:
                    return True
        except (URLError, OSError):  # not yet
            pass
        sleep(0.1)
    return False


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(ENDING)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
