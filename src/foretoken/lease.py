"""Leases: Speculators and engines may share a model or a drafter, but only one Speculator or engine
at a time may put sequences into a shared model or drafter.

Each leased model or drafter, here called a part, has an attribute that refers to the record of its
lease. If Ctrl-C interrupts the generation, even during its cleanup, the lease ends when its `Lease`
object is garbage-collected. The next lease of the same parts removes all sequences that are still
in the parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from threading import RLock, Thread, current_thread
from weakref import ref

from foretoken.drafters.base import Drafter, iter_parts
from foretoken.errors import InputError, RefusedError
from foretoken.models.base import Component, Model

# reentrant: a generator that is garbage-collected meanwhile releases its lease in the same thread
LEASE_LOCK = RLock()
LEASE_ATTRIBUTE, ENGINE_ATTRIBUTE = "_foretoken_tenancy", "_foretoken_engine"


class LeaseRecord:
    """The models and drafters of a lease, and the number of its sequences. The next lease uses this
    record to clean up after an interruption."""

    def __init__(self, lease: Lease, target: Model, drafter: Drafter | None) -> None:
        self.drafter = drafter
        self.parts = [*iter_parts(target), *(iter_parts(drafter) if drafter else ())]
        self.num_drafted = 0  # upper limit on the sequences in the drafter
        self.thread: Thread = current_thread()
        self.is_over = False
        self._lease = ref(lease)  # dead once the run has ended in any way

    @property
    def has_ended(self) -> bool:
        return self.is_over or self._lease() is None

    def clear(self) -> None:
        """Remove all sequences from the target, the drafter and their parts, even if an earlier
        removal was interrupted."""
        try:
            if self.drafter is not None and self.num_drafted:
                self.drafter.leave(list(range(self.num_drafted)))
        finally:
            for part in self.parts:
                if isinstance(part, Component):
                    part.clear()
        self.num_drafted = 0


class Lease:
    """The right to put sequences into a target, a drafter and the models that they contain."""

    def __init__(self, target: Model, drafter: Drafter | None = None) -> None:
        self.target, self.drafter = target, drafter
        self.record = LeaseRecord(self, target, drafter)

    def acquire(self) -> None:
        """Take the lease of all parts, and remove sequences that an interrupted lease left in the
        parts. Raises RefusedError if another lease that has not ended has one of the parts."""
        with LEASE_LOCK:
            before: list[LeaseRecord] = [x for x in map(find_lease_record, self.record.parts) if x]
            for record in before:
                if not record.has_ended:
                    raise _make_refusal(record.thread)
            for record in before:
                _evict(record)
            set_exposed_states(self.target, self.drafter)
            for part in self.record.parts:
                _set_attribute(part, LEASE_ATTRIBUTE, self.record)

    def count_joining(self, num_joining: int) -> None:
        """Add `num_joining` to `num_drafted`. Call this before the sequences join the drafter."""
        self.record.num_drafted += num_joining

    @property
    def num_drafted(self) -> int:
        """The number of the target's sequences that have joined the drafter too. These sequences
        are in the first rows of the target's batch."""
        return self.record.num_drafted

    def leave(self, rows: list[int]) -> None:
        """Remove the sequences in these rows from the models; later rows move up."""
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
    """Make a target expose its hidden states if and only if a part of the drafter reads them."""
    drafters = [part for part in iter_parts(drafter) if isinstance(part, Drafter)]
    target.expose_hidden_states(
        next((part.count_cached_tokens for part in drafters if part.reads_states), None)
    )


@contextmanager
def hold_lease(target: Model, drafter: Drafter | None = None) -> Iterator[Lease]:
    """Hold a lease within the `with`, and remove all sequences at its end. Raises RefusedError as
    `Lease.acquire` does."""
    lease = Lease(target, drafter)
    try:
        lease.acquire()
        yield lease
    finally:
        lease.release()


def find_lease_record(part: object) -> LeaseRecord | None:
    """Return the record of the lease that has this part, or of an interrupted lease that did not
    free the part; None if there is no such lease."""
    found: LeaseRecord | None = getattr(part, LEASE_ATTRIBUTE, None)
    # a copy of a leased part has the attribute, too
    return found if found is not None and any(part is each for each in found.parts) else None


def engage(parts: Sequence[object], engine: object) -> None:
    """Assign the parts to an engine. Raises InputError if a part has an engine already."""
    with LEASE_LOCK:
        if any(_engine_of(part) is not None for part in parts):
            raise InputError(
                "these models have an engine; close that engine first, or load the models again"
            )
        for part in parts:
            _set_attribute(part, ENGINE_ATTRIBUTE, (id(part), ref(engine)))


def disengage(parts: Sequence[object], engine: object) -> None:
    """Free the parts that are assigned to this engine."""
    with LEASE_LOCK:
        for part in parts:
            if _engine_of(part) is engine:
                _set_attribute(part, ENGINE_ATTRIBUTE, None)


def _engine_of(part: object) -> object | None:
    number, engine = getattr(part, ENGINE_ATTRIBUTE, None) or (0, None)
    return engine() if engine is not None and number == id(part) else None


def _set_attribute(part: object, name: str, value: object) -> None:
    with suppress(AttributeError):  # a user's class with slots has no lease and no engine
        object.__setattr__(part, name, value)


def _evict(record: LeaseRecord) -> None:
    """Remove the sequences of a lease and free the parts that it still has. If Ctrl-C interrupts
    this call, the next lease of the parts repeats it."""
    owned = [part for part in record.parts if find_lease_record(part) is record]
    try:
        if all(find_lease_record(part) in (record, None) for part in record.parts):
            record.clear()  # otherwise `acquire` was interrupted, before any sequence joined
    except Exception:  # from a user's drafter: raised once, not at every later lease
        _clear_attributes(owned)
        raise
    _clear_attributes(owned)


def _clear_attributes(parts: list[object]) -> None:
    for part in parts:
        _set_attribute(part, LEASE_ATTRIBUTE, None)


def _make_refusal(thread: Thread) -> RefusedError:
    if thread is current_thread():
        return RefusedError(
            "a stream of this target or draft is still open; first exhaust or close that stream"
        )
    return RefusedError(
        f"thread {thread.name!r} is generating with this target or draft, or has an open stream of "
        "this target or draft; wait for that thread, or load a separate pair for each thread"
    )
