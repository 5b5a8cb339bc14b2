"""The other ranks as processes that rank 0 starts, on this machine alone.

They meet by a file and talk over the loopback interface: nothing of it can be reached from another
machine. However rank 0 ends, they end with it.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory

from foretoken.errors import RefusedError
from foretoken.models.parallel.part import join

INTERFACE = "GLOO_SOCKET_IFNAME"  # the environment variable by which gloo chooses one
GRACE = 5.0  # seconds that a process has to end


class Processes:
    """Ranks 1 and up, each with so many threads."""

    def __init__(self, ranks: int, threads: int) -> None:
        self.ranks = ranks
        self._interface = loopback()
        self._folder = TemporaryDirectory(prefix="foretoken-ranks-")
        self._running = {rank: self._started(rank, threads) for rank in range(1, ranks)}

    def join(self) -> None:
        """Meet them."""
        before = os.environ.get(INTERFACE)
        os.environ[INTERFACE] = self._interface
        try:
            join(self._store, 0, self.ranks)
        finally:
            del os.environ[INTERFACE]
            os.environ.update({} if before is None else {INTERFACE: before})

    def ended(self) -> list[str]:
        """Those that have ended, and how."""
        over = [rank for rank, process in self._running.items() if process.poll() is not None]
        return [f"rank {rank} of {self.ranks} has ended ({self._ending(rank)})" for rank in over]

    def close(self) -> None:
        """End them all."""
        for process in self._running.values():
            _end(process)
        self._folder.cleanup()

    @property
    def _store(self) -> Path:
        return Path(self._folder.name) / "store"

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def _started(self, rank: int, threads: int) -> subprocess.Popen[bytes]:
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "foretoken.models.parallel.follower"]
                + [str(self._store), str(rank), str(self.ranks), str(threads)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {INTERFACE: self._interface},
                start_new_session=True,  # Ctrl-C is rank 0's to hear
            )

    def _ending(self, rank: int) -> str:
        """By which signal, or the last line that it wrote."""
        status = self._running[rank].returncode
        if status < 0:
            with suppress(ValueError):
                return signal.Signals(-status).name
        lines = self._log(rank).read_text(errors="replace").split("\n")
        output = [line.strip()[:200] for line in lines if line.strip()]
        return output[-1] if output else f"status {status}"


def _end(process: subprocess.Popen[bytes]) -> None:
    assert process.stdin is not None
    with suppress(OSError):
        process.stdin.close()  # at which it ends
    try:
        process.wait(GRACE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def loopback() -> str:
    """The interface that only this machine reaches."""
    names = [name for _, name in socket.if_nameindex() if name.startswith("lo")]
    if not names:
        raise RefusedError("tensor_parallel needs a loopback interface, and there is none here")
    return names[0]
