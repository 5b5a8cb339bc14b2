"""The ranks of a tensor parallel run, seen from rank 0: called together, and ended.

All calls are made by one thread, so a Ctrl-C cannot leave rank 0 halfway through a call while the
other ranks go on. Does not know how they are started.
"""

from __future__ import annotations

import atexit
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, wait
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from threading import Lock, Thread
from time import monotonic, sleep
from typing import Any, TypeVar
from weakref import finalize

import torch
import torch.distributed as dist

from foretoken.errors import ForetokenError, LostError, RefusedError, one_line
from foretoken.models.parallel.part import Call, Part
from foretoken.models.parallel.processes import GRACE, Processes
from foretoken.models.parallel.torchrun import Launched, launched

T = TypeVar("T")
LOOK = 0.5  # seconds between looks at whether the other ranks live
STARTED: list[Ranks] = []  # one at most that runs: torch.distributed has one world in a process
LOCK = Lock()


def start(ranks: int) -> Ranks:
    """So many ranks, this process being rank 0: those that run already, those that torchrun has
    started, or new processes. RefusedError where another number of them runs, or torch.distributed
    does something else here."""
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
                "load the model in another process"
            )
        threads = torch.get_num_threads()
        if launched():
            ranks_started = Ranks(Launched(ranks), threads)
        else:
            shared = max(1, threads // ranks)  # the ranks share this machine's processors
            ranks_started = Ranks(Processes(ranks, shared), shared)
        STARTED[:] = [ranks_started]
        return ranks_started


class Ranks:
    """Rank 0 and the `others`. threads: torch's in the calls of rank 0."""

    def __init__(self, others: Processes | Launched, threads: int) -> None:
        self.ranks = others.ranks
        self.lost: LostError | None = None  # why there are no ranks any more
        self.gone: deque[int] = deque()  # models that were collected
        self._others, self._threads = others, threads
        self._numbers = count()
        self._jobs: SimpleQueue[tuple[Future[Any], Callable[[], Any]]] = SimpleQueue()
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
        if self.lost is None:
            self.lost = LostError("the ranks of this model have been ended; load it again")
            self._soon(_dismiss)
            self._end()

    def _end(self) -> None:
        atexit.unregister(self.close)
        self._others.close()
        self._soon(_leave)

    def _call(self, number: int, method: str, *args: Any) -> Call:
        numbers = tuple(self.gone.popleft() for _ in range(len(self.gone)))
        return Call(number, method, args, numbers)

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
        while not wait([future], LOOK).done and not self._others.ended():
            pass
        wait([future], GRACE)  # one that has ended breaks off the call
        try:
            return future.result(0)
        except ForetokenError:  # raised by all ranks alike, before they talked
            raise
        except Exception as error:  # rank 0 may have left a call that others are still in
            raise self._lose(error) from error

    def _lose(self, error: Exception) -> LostError:
        """The error that says which rank has ended, or else what failed at rank 0."""
        until = monotonic() + GRACE
        while not (reasons := self._others.ended()) and monotonic() < until:
            sleep(LOOK / 10)
        failed = f"a call of {self.ranks} ranks failed at rank 0: {one_line(error)}"
        self.lost = LostError("; ".join(reasons) or failed)
        self._end()
        return self.lost

    def _soon(self, job: Callable[[], None]) -> None:
        """A job that ranks that hang may keep from being done."""
        future: Future[None] = Future()
        self._jobs.put((future, job))
        wait([future], GRACE)

    def _begin(self) -> Part:
        torch.set_num_threads(self._threads)  # of this thread
        self._others.join()
        return Part()

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


def _dismiss() -> None:
    with suppress(Exception):  # one may have ended
        dist.broadcast_object_list([None], 0)


def _leave() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
