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


class Child(NamedTuple):
    """An engine's process, while it loads or runs, and the pipe to it."""

    process: Process
    pipe: Pipe


def spawned(setup: Setup) -> Child:
    """An engine in a process of its own, which ends with this one."""
    context = get_context("spawn")  # a fork would take threads' locks along
    own_end, child_end = context.Pipe()
    process = context.Process(
        target=work, args=(child_end, setup), name="foretoken engine", daemon=True
    )
    process.start()
    child_end.close()
    return Child(process, own_end)
