"""Where an engine runs: by itself in a process of this machine, at the other end of a pipe."""

from __future__ import annotations

from multiprocessing import get_context
from typing import Any, NamedTuple, Protocol

from foretoken.server.engine.worker import Setup, work


class Pipe(Protocol):
    """As multiprocessing's `Connection`: EOFError or OSError once the other end is gone."""

    def recv(self) -> Any: ...

    def send_bytes(self, buf: Any, /) -> None: ...


class Process(Protocol):
    """What ends with its engine."""

    def join(self, timeout: float) -> None:
        """Wait for its end, at most so many seconds."""
        ...

    def kill(self) -> None:
        """End it now, if it has not ended; its pipe ends too."""
        ...


class Begun(NamedTuple):
    """An engine that loads, or runs."""

    process: Process
    pipe: Pipe


def spawned(setup: Setup) -> Begun:
    """An engine in a process of its own, which ends with this one."""
    context = get_context("spawn")  # a fork would take threads' locks along
    ours, theirs = context.Pipe()
    process = context.Process(
        target=work, args=(theirs, setup), name="foretoken engine", daemon=True
    )
    process.start()
    theirs.close()
    return Begun(process, ours)
