"""The processes of a tensor parallel run, seen from rank 0: started, called together, ended.

They meet through a file and talk over the loopback interface: nothing of it can be reached from
another machine. All calls are made by one thread of rank 0, so a Ctrl-C cannot leave it halfway
through a call while the other ranks go on.
"""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import count
from pathlib import Path
from queue import SimpleQueue
from tempfile import TemporaryDirectory
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist

from foretoken.errors import ForetokenError, LostError, RefusedError
from foretoken.models.parallel.part import Call, Part, join

T = TypeVar("T")
INTERFACE = "GLOO_SOCKET_IFNAME"  # the environment variable by which gloo chooses one
LOOK = 0.5  # seconds between looks at whether the other ranks live
GRACE = 5.0  # seconds that a process has to end
STARTED: list[Ranks] = []  # at most one that runs: torch.distributed has one world a process
LOCK = Lock()


def start(ranks: int) -> Ranks:
    """So many ranks, this process being rank 0: those that run already, or new ones. RefusedError
    where another number of them runs, or torch.distributed does something else here."""
    with LOCK:
        running = [each for each in STARTED if each.lost is None]
        if running and running[0].ranks == ranks:
            return running[0]
        if running and running[0].part.models.keys() - set(running[0].gone):
            raise RefusedError(
                f"tensor_parallel is {ranks}, but this process has a model on "
                f"{running[0].ranks} ranks; give {running[0].ranks}, or use another process"
            )
        for each in running:
            each.close()
        if dist.is_initialized():
            raise RefusedError(
                f"tensor_parallel is {ranks}, but this process uses torch.distributed already; "
                "load the model in a process that does not (without torchrun: ranks are started "
                "here)"
            )
        STARTED[:] = [Ranks(ranks)]
        return STARTED[0]


class Ranks:
    """Rank 0 and the processes of the others."""

    def __init__(self, ranks: int) -> None:
        self.ranks = ranks
        self.lost: LostError | None = None  # why there are no ranks any more
        self.gone: deque[int] = deque()  # models that were collected
        self._numbers = count()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
        self._folder = TemporaryDirectory(prefix="foretoken-ranks-")
        self._threads = max(1, torch.get_num_threads() // ranks)
        self._others = {rank: self._process(rank) for rank in range(1, ranks)}
        Thread(target=self._work, name="foretoken-rank-0", daemon=True).start()
        atexit.register(self.close)
        self.part: Part = self._done(self._begin)

    def take(self, own: Callable[[], Any], theirs: Callable[[], Any]) -> int:
        """The number of a new model, whose whole network rank 0 gets from `own`, the other ranks
        from `theirs`, a function that can be pickled."""
        call = self._call(next(self._numbers), "take", theirs)
        self._together(call, lambda: self.part.take(call.number, own))
        return call.number

    def call(self, number: int, method: str, *args: Any) -> Any:
        """What a model's method returns on rank 0, when all ranks have called it. Raises what it
        raises, and LostError where a rank has ended."""
        call = self._call(number, method, *args)
        return self._together(call, lambda: self.part.play(call))

    def drop(self, number: int, owner: object) -> None:
        """The model is given up when its `owner` is collected."""
        finalize(owner, self.gone.append, number).atexit = False

    def close(self) -> None:
        """End the other ranks."""
        atexit.unregister(self.close)
        self.lost = self.lost or LostError("the ranks of this model have been ended; load it again")
        for process in self._others.values():
            _end(process)
        idle: Future[None] = Future()
        self._jobs.put((idle, _leave))
        wait([idle], GRACE)
        self._folder.cleanup()

    def _call(self, number: int, method: str, *args: Any) -> Call:
        gone = tuple(self.gone.popleft() for _ in range(len(self.gone)))
        return Call(number, method, args, gone)

    def _together(self, call: Call, own: Callable[[], T]) -> T:
        def job() -> T:
            dist.broadcast_object_list([call], 0)
            return own()

        return self._done(job)

    def _done(self, job: Callable[[], T]) -> T:
        """What a job of all ranks returns, done by the thread that makes their calls."""
        if self.lost is not None:
            raise self.lost
        future: Future[T] = Future()
        self._jobs.put((future, job))
        while not wait([future], LOOK).done and not self._ended():
            pass
        wait([future], GRACE)  # one that ended breaks off the call
        try:
            return future.result(0)
        except ForetokenError:  # raised by all ranks alike, before they talked
            raise
        except Exception as error:  # rank 0 may have left a call that others are still in
            raise self._lose() from error

    def _lose(self) -> Exception:
        """The error that says which rank has ended; that of rank 0 where it was itself."""
        until = monotonic() + GRACE
        while not (ended := self._ended()) and monotonic() < until:
            sleep(LOOK / 10)
        said = [f"rank {rank} of {self.ranks} has ended ({self._how(rank)})" for rank in ended]
        self.lost = LostError("; ".join(said) or f"rank 0 of {self.ranks} failed in a call")
        self.close()
        return self.lost

    def _ended(self) -> list[int]:
        return [rank for rank, process in self._others.items() if process.poll() is not None]

    def _how(self, rank: int) -> str:
        """By a signal, or with the last line that it wrote."""
        status = self._others[rank].returncode
        if status < 0:
            with suppress(ValueError):
                return signal.Signals(-status).name
        lines = self._log(rank).read_text(errors="replace").split("\n")
        return next((line.strip()[:200] for line in reversed(lines) if line.strip()), str(status))

    def _log(self, rank: int) -> Path:
        return Path(self._folder.name) / f"rank-{rank}.log"

    def _process(self, rank: int) -> subprocess.Popen[bytes]:
        with self._log(rank).open("wb") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "foretoken.models.parallel.follower"]
                + [str(self._store), str(rank), str(self.ranks), str(self._threads)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=os.environ | {INTERFACE: loopback()},
                start_new_session=True,  # Ctrl-C is rank 0's to hear
            )

    @property
    def _store(self) -> Path:
        return Path(self._folder.name) / "store"

    def _begin(self) -> Part:
        torch.set_num_threads(self._threads)  # of this thread: the ranks share the processors
        before = os.environ.get(INTERFACE)
        os.environ[INTERFACE] = loopback()
        try:
            join(self._store, 0, self.ranks)
            return Part()
        finally:
            del os.environ[INTERFACE]
            os.environ.update({} if before is None else {INTERFACE: before})

    def _work(self) -> None:
        while True:
            future, job = self._jobs.get()
            try:
                future.set_result(job())
            except BaseException as error:
                future.set_exception(error)
            if job is _leave:
                return
            del future, job  # while it waits: they hold results and models


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


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
