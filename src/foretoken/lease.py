"""One run at a time: who may put rows into a model or a drafter that several objects share.

A run that Ctrl-C breaks off anywhere, even while it cleans up, ends with its `Lease`; rows it left
behind are removed by the next lease of the same parts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from threading import RLock, Thread, current_thread
from typing import cast
from weakref import ref

from foretoken.drafters.base import Drafter, Watches, held
from foretoken.errors import RefusedError
from foretoken.models.base import Model, Shows


class Tenancy:
    """A target and a drafter in use: all that the next lease needs to clean up after this one."""

    def __init__(self, lease: Lease, target: Model, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.parts = [*held(target), *(held(drafter) if drafter else ())]
        self.rows = self.drafted = 0  # in the target and the drafter, at most
        self.thread: Thread = current_thread()
        self.over = False
        self._lease = ref(lease)  # dead once the run is gone, however it ended

    @property
    def ended(self) -> bool:
        return self.over or self._lease() is None

    def clear(self) -> None:
        """Remove all rows, also after a removal that was broken off."""
        try:
            if self.drafter is not None and self.drafted:
                self.drafter.leave(list(range(self.drafted)))
        finally:
            for part in self.parts:
                if hasattr(part, "permute"):
                    cast(Model, part).permute([])
        self.rows = self.drafted = 0


TENANTS: dict[int, Tenancy] = {}  # by id of every part; its tenancy keeps the part alive
LOCK = RLock()  # a generator that is collected meanwhile releases its lease in the same thread


class Lease:
    """The right to put rows into a target, a drafter and all that they hold."""

    def __init__(self, target: Model, drafter: Drafter | None = None) -> None:
        self.target, self.drafter = target, drafter
        self.tenancy = Tenancy(self, target, drafter)

    def take(self) -> None:
        """Take the parts. Raises RefusedError where another run has one of the parts."""
        with LOCK:
            before = [TENANTS[id(part)] for part in self.tenancy.parts if id(part) in TENANTS]
            for tenancy in before:
                if not tenancy.ended:
                    raise _refusal(tenancy.thread)
            for tenancy in before:
                _evict(tenancy)
            watches(self.target, self.drafter)
            TENANTS.update((id(part), self.tenancy) for part in self.tenancy.parts)

    def expect(self, rows: int, drafted: int) -> None:
        """Count so many rows that are about to join the target, and the drafter. The drafter has
        the target's first rows, and may be behind."""
        self.tenancy.rows += rows
        self.tenancy.drafted += drafted

    @property
    def drafted(self) -> int:
        """The first rows, so many of them, are in the drafter too."""
        return self.tenancy.drafted

    def leave(self, rows: list[int]) -> None:
        """Remove finished rows; those behind move up."""
        if rows:
            self.target.leave(rows)
            drafted = [b for b in rows if b < self.drafted]
            if self.drafter is not None and drafted:
                self.drafter.leave(drafted)
            self.tenancy.drafted -= len(drafted)
            self.tenancy.rows -= len(rows)

    def release(self) -> None:
        """Remove all rows and free the parts."""
        self.tenancy.over = True
        with LOCK:
            _evict(self.tenancy)


def watches(target: Model, drafter: Drafter | None) -> None:
    """Let a target show its states where a part of the drafter reads them, and nowhere else."""
    if isinstance(target, Shows):
        parts = held(drafter) if drafter else ()
        target.show(next((part.known for part in parts if isinstance(part, Watches)), None))


@contextmanager
def leased(target: Model, drafter: Drafter | None = None) -> Iterator[Lease]:
    """Hold a lease for the length of a `with`, which leaves no rows; RefusedError as
    `Lease.take`."""
    lease = Lease(target, drafter)
    try:
        lease.take()
        yield lease
    finally:
        lease.release()


def _evict(tenancy: Tenancy) -> None:
    """Free the parts that it still has. If Ctrl-C breaks this off, the next lease does it."""
    owned = [id(part) for part in tenancy.parts if TENANTS.get(id(part)) is tenancy]
    try:
        if len(owned) == len(tenancy.parts):  # else `take` was broken off, before any row joined
            tenancy.clear()
    except Exception:  # of a user's drafter: raised once, not at every later lease
        for part in owned:
            del TENANTS[part]
        raise
    for part in owned:
        del TENANTS[part]


def _refusal(thread: Thread) -> RefusedError:
    if thread is current_thread():
        return RefusedError(
            "a stream of this target or draft is still open; read it to its end or close it first"
        )
    return RefusedError(
        f"thread {thread.name!r} is generating with this target or draft, or has a stream of it "
        "open; wait for it, or load a pair for each thread"
    )
