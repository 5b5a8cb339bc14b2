"""One run at a time: who may put sequences into a model or a drafter that several objects share.

Each part remembers who has it, as an attribute. A run that Ctrl-C breaks off anywhere, even while
it cleans up, ends with its `Lease`; sequences that it left are removed by the next lease of the
same parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock, Thread, current_thread
from weakref import ref

from foretoken.drafters.base import Drafter, iter_parts
from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Component, Model

LEASE_LOCK = (
    RLock()
)  # a generator that is collected meanwhile releases its lease in the same thread
LEASE_ATTRIBUTE, ENGINE_ATTRIBUTE = (
    "_foretoken_tenancy",
    "_foretoken_engine",
)  # attributes of a part


class LeaseRecord:
    """A target and a drafter in use: all that the next lease needs to clean up after this one."""

    def __init__(self, lease: Lease, target: Model, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.parts = [*iter_parts(target), *(iter_parts(drafter) if drafter else ())]
        self.num_drafted = 0  # sequences in the drafter, at most
        self.thread: Thread = current_thread()
        self.is_over = False
        self._lease = ref(lease)  # dead once the run is gone, however it ended

    @property
    def has_ended(self) -> bool:
        return self.is_over or self._lease() is None

    def clear(self) -> None:
        """Remove all sequences, also after a removal that was broken off."""
        try:
            if self.drafter is not None and self.num_drafted:
                self.drafter.leave(list(range(self.num_drafted)))
        finally:
            for part in self.parts:
                if isinstance(part, Component):
                    part.clear()
        self.num_drafted = 0


class Lease:
    """The right to put sequences into a target, a drafter and all that they hold."""

    def __init__(self, target: Model, drafter: Drafter | None = None) -> None:
        self.target, self.drafter = target, drafter
        self.record = LeaseRecord(self, target, drafter)

    def acquire(self) -> None:
        """Take the parts. Raises RefusedError where another run has one of the parts."""
        with LEASE_LOCK:
            before: list[LeaseRecord] = [x for x in map(find_lease_record, self.record.parts) if x]
            for tenancy in before:
                if not tenancy.has_ended:
                    raise _make_refusal(tenancy.thread)
            for tenancy in before:
                _evict(tenancy)
            set_exposed_states(self.target, self.drafter)
            for part in self.record.parts:
                _set_attribute(part, LEASE_ATTRIBUTE, self.record)

    def count_joining(self, num_joining: int) -> None:
        """Count sequences that are about to join the drafter. It has the target's first sequences,
        and may be behind."""
        self.record.num_drafted += num_joining

    @property
    def num_drafted(self) -> int:
        """The number of first sequences that are in the drafter too."""
        return self.record.num_drafted

    def leave(self, rows: list[int]) -> None:
        """Remove finished sequences; those behind move up."""
        if rows:
            self.target.leave(rows)
            drafted = [b for b in rows if b < self.num_drafted]
            if self.drafter is not None and drafted:
                self.drafter.leave(drafted)
            self.record.num_drafted -= len(drafted)

    def release(self) -> None:
        """Remove all sequences and free the parts."""
        self.record.is_over = True
        with LEASE_LOCK:
            _evict(self.record)


def set_exposed_states(target: Model, drafter: Drafter | None) -> None:
    """Let a target show its states where a part of the drafter reads them, and nowhere else."""
    drafters = [part for part in iter_parts(drafter) if isinstance(part, Drafter)]
    target.expose_hidden_states(
        next((part.count_cached_tokens for part in drafters if part.reads_states), None)
    )


@contextmanager
def hold_lease(target: Model, drafter: Drafter | None = None) -> Iterator[Lease]:
    """Hold a lease for the length of a `with`, which leaves no sequences; raises RefusedError as
    `Lease.take`."""
    lease = Lease(target, drafter)
    try:
        lease.acquire()
        yield lease
    finally:
        lease.release()


def find_lease_record(part: object) -> LeaseRecord | None:
    """Return who has a part, or had it and was broken off."""
    found: LeaseRecord | None = getattr(part, LEASE_ATTRIBUTE, None)
    # a copy of a part that is in use has the attribute, too
    return found if found is not None and any(part is own for own in found.parts) else None


def engage(parts: Sequence[object], engine: object) -> None:
    """Give the parts to an engine. Raises InputError where one of them has one."""
    with LEASE_LOCK:
        if any(_engine_of(part) is not None for part in parts):
            raise InputError("these models have an engine; close it first, or load another pair")
        for part in parts:
            _set_attribute(part, ENGINE_ATTRIBUTE, (id(part), ref(engine)))


def disengage(parts: Sequence[object], engine: object) -> None:
    """Take the parts from their engine."""
    with LEASE_LOCK:
        for part in parts:
            if _engine_of(part) is engine:
                _set_attribute(part, ENGINE_ATTRIBUTE, None)


def _engine_of(part: object) -> object | None:
    number, engine = getattr(part, ENGINE_ATTRIBUTE, None) or (0, None)
    return engine() if engine is not None and number == id(part) else None


def _set_attribute(part: object, name: str, value: object) -> None:
    with suppress(AttributeError):  # of a user's class with slots, which is then not guarded
        object.__setattr__(part, name, value)


def _evict(tenancy: LeaseRecord) -> None:
    """Free the parts that it still has. If Ctrl-C breaks this off, the next lease does it."""
    owned = [part for part in tenancy.parts if find_lease_record(part) is tenancy]
    try:
        if all(find_lease_record(part) in (tenancy, None) for part in tenancy.parts):
            tenancy.clear()  # else `take` was broken off, before any sequence joined
    except Exception:  # of a user's drafter: raised once, not at every later lease
        _clear_attributes(owned)
        raise
    _clear_attributes(owned)


def _clear_attributes(parts: list[object]) -> None:
    for part in parts:
        _set_attribute(part, LEASE_ATTRIBUTE, None)


def _make_refusal(thread: Thread) -> RefusedError:
    if thread is current_thread():
        return RefusedError(
            "a stream of this target or draft is still open; read it to its end or close it first"
        )
    return RefusedError(
        f"thread {thread.name!r} is generating with this target or draft, or has a stream of it "
        "open; wait for it, or load a pair for each thread"
    )
