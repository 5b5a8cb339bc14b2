"""Which rows run and which wait: first come, first served.

Any number of threads may bring rows; whoever waits for his own takes the next step for all. A long
prompt is read in pieces beside the rows that run, so that none of them stalls. Rows whose pass is
broken off go back to the queue and are read anew, which changes no text.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain, groupby, islice, takewhile
from threading import RLock, Thread, current_thread
from time import perf_counter, sleep
from weakref import WeakValueDictionary, ref

from foretoken.costing.gamma import Beside, Fixed, Gamma, free
from foretoken.drafters.base import Drafter, held
from foretoken.engine.batch import Batch
from foretoken.engine.memory import Memory, reserve_kept
from foretoken.engine.prefill_budget import PrefillBudget
from foretoken.errors import InputError, NumericsError, RefusedError
from foretoken.models.base import Model
from foretoken.request import Row
from foretoken.sampling.verifier import Verifier

LOGGER = logging.getLogger(__name__)
SOME, HELD = 4, 8  # a quarter of the batch joins at once, or what there is room for steps later
AHEAD = 64  # tokens that rows may gain before the one that joins last has to make room again
ENGAGED: WeakValueDictionary[int, Scheduler] = WeakValueDictionary()  # by the ids of its parts
TURN = 0.01  # seconds for which a thread gives way to those that wait, at most


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A row, who judges its draft tokens, and who says how many to make."""

    row: Row
    verifier: Verifier
    gamma: Gamma
    priority: int = 0  # those of a greater one go first

    @property
    def drafts(self) -> bool:
        return self.gamma != Fixed(0)


@dataclass(slots=True, weakref_slot=True)
class _Turn:
    """A step that is being taken; dead once its frame is, however that ended."""

    thread: Thread
    over: bool = False


class Scheduler:
    """The queue before a batch of at most `most` rows. clock: the seconds that steps are timed by,
    where these are not the process's own."""

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        most: int,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.batch, self.most, self._clock = Batch(target, drafter), most, clock
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []  # as the batch's rows
        self.suspects: list[Row] = []  # that joined or ran last: one of them, if that failed
        self.prefill_budget = PrefillBudget()
        self.memory: Memory | None = None  # None: as much as the rows need
        self.preempted = 0  # rows that had to wait again, as memory ran short
        self._lock = RLock()  # a stream that is collected meanwhile aborts in the same thread
        self._asking: set[Thread] = set()  # that wait for the lock
        self._turn: ref[_Turn] | None = None
        self._leaving: list[Row] = []  # aborted during the step that runs
        self._held = 0  # steps for which places were left free

    def run(self, rows: list[Row], verifier: Verifier, gamma: Gamma) -> Generator[None]:
        """Advance fresh rows until all are finished; yields whenever they may have moved. Rows of
        others are advanced with them. Raises what a step raises; what is left of the rows then
        leaves, as it does when the generator is closed."""
        try:
            self.submit([Task(row, verifier, gamma) for row in rows])
            going = True
            while going:
                self._give_way()
                with self._locked():  # others may have finished them meanwhile
                    going = _unfinished(rows) and (self._take_step() or _unfinished(rows))
                yield
        finally:
            self.abort(rows)

    def submit(self, tasks: list[Task]) -> None:
        """They wait behind those that do; InputError where memory is too small for one of them."""
        self.refuse_inner()
        with self._locked():
            for task in tasks:
                if self.memory is not None:
                    self.memory.require(task.row)
            self.waiting = _sorted([*self.waiting, *tasks])

    def step(self) -> bool:
        """Take a step for all that run; whether any did. Raises what broke it off: the rows are
        then in the queue again."""
        self._give_way()
        with self._locked():
            return self._take_step()

    def fail(self, error: RefusedError) -> None:
        """Fail the rows that joined or ran in the step that raised `error`."""
        with self._locked():
            for row in self.suspects:
                if row.finish_reason is None:
                    row.fail(error)
            self._drop(self.suspects)

    def preempt(self) -> None:
        """Let the youngest of the running rows of the least priority wait again, before all others
        of its priority."""
        with self._locked():
            last = min(reversed(self.running), key=lambda task: task.priority)
            self._await([last.row])
            self.preempted += 1

    @property
    def unused(self) -> bool:
        """True where no sequence runs or waits."""
        return not self.running and not self.waiting

    @contextmanager
    def still(self) -> Generator[None]:
        """No step is taken meanwhile: rows can be looked at."""
        with self._locked():
            yield

    def abort(self, rows: list[Row]) -> None:
        """Drop these rows, queued or running. Finished rows are ignored."""
        rows = [row for row in rows if row.finish_reason is None]
        if not rows:
            return
        if self._stepping():
            self._leaving += rows
            return
        with self._locked():
            self._drop(rows)

    @contextmanager
    def idle(self) -> Generator[None]:
        """The models without rows; those that run go on afterwards."""
        self.refuse_inner()
        with self._locked():
            self._requeue()
            yield

    def engage(self, most: int, memory: int | None, *, keep: bool) -> None:
        """For an engine: at most so many rows and bytes of keys and values (None: what the rows
        need), and whether models keep what they read. InputError where one of them has an engine,
        and as `Memory`."""
        parts = [*held(self.batch.target), *held(self.batch.drafter)]
        if any(id(part) in ENGAGED for part in parts):
            raise InputError("these models have an engine; close it first, or load another pair")
        limited = None if memory is None else Memory(parts, memory)
        with self.idle():
            if limited is not None:
                limited.reserve()
            elif keep:
                reserve_kept(self.batch.keeping)
            self._remember(keep)
            self.memory, self.preempted, self.most = limited, 0, most
            ENGAGED.update((id(part), self) for part in parts)

    def disengage(self, most: int) -> None:
        """The engine is closed."""
        with self.idle():
            for name in [name for name, other in ENGAGED.items() if other is self]:
                del ENGAGED[name]
            self.memory, self.most = None, most
            self._remember(False)

    def _remember(self, on: bool) -> None:
        for part in self.batch.keeping:
            part.remember(on)

    @contextmanager
    def _locked(self) -> Generator[None]:
        me = current_thread()
        self._asking.add(me)
        try:
            with self._lock:
                self._asking.discard(me)
                yield
        finally:
            self._asking.discard(me)

    def _give_way(self) -> None:
        """Others that wait for the lock get it first: Python's locks are not fair."""
        until = perf_counter() + TURN
        while self._asking and perf_counter() < until:
            sleep(TURN / 10)

    def _drop(self, rows: list[Row]) -> None:
        gone = {id(row) for row in rows}
        self.waiting = deque(task for task in self.waiting if id(task.row) not in gone)
        leaving = [task.row for task in self.running if id(task.row) in gone]
        if leaving:
            self.running = [task for task in self.running if id(task.row) not in gone]
            try:
                self.batch.leave(leaving)
            except BaseException:
                self._requeue()
                raise

    def _take_step(self) -> bool:
        self.refuse_inner()
        turn = _Turn(current_thread())
        try:
            self._turn = ref(turn)
            return self._step()
        except BaseException:
            self._requeue()
            raise
        finally:
            turn.over = True
            if self._leaving:
                self._drop(self._leaving)
                self._leaving = []

    def _step(self) -> bool:
        if [task.row for task in self.running] != self.batch.rows:  # broken off in between
            self._requeue()
        self._await(self.batch.outgrown)
        already = self._admit()
        if not self.running:
            return False
        self._make_room()
        self.suspects = self.batch.undrafted
        self.batch.join_drafter()
        moved = self.suspects = list(self.batch.rows)
        reads = self.prefill_budget.reads(moved, already)
        telling = any(row.telling for row in moved)  # which takes a pass of its own
        start, gamma = self._now(), self._gamma(moved, reads)
        try:
            self.batch.step(self.running[0].verifier, gamma, reads)
        except NumericsError as error:
            if error.row is None:
                raise
            self._distrust(moved[error.row], error, drafted=gamma[error.row] > 0)
            self._requeue()  # the others take the step again
        if not telling:
            self.prefill_budget.see(reads, self._now() - start)
        self.running = [task for task in self.running if not task.row.finish_reason]
        return True

    def _distrust(self, row: Row, error: NumericsError, *, drafted: bool) -> None:
        """Fail a row with invalid logits, unless its draft tokens may be the cause.

        Attention sums over all positions of a pass and 0 * NaN is NaN, so a draft token with
        invalid keys and values spoils the target's logits before it too. Such a row takes the
        step again, and all later ones, without draft tokens. In the draft, invalid keys that a
        rejected draft token has left do the same where a longer row's pass reaches them: the row
        takes the step again once, over what is then read anew.
        """
        if drafted and error.whose == "target":
            row.plain = True
            LOGGER.warning("%s; the text goes on without draft tokens", error)
        elif drafted and row.doubted < len(row.tokens):
            row.doubted = len(row.tokens)
        else:
            row.fail(error)

    def _gamma(self, rows: list[Row], reads: list[int]) -> list[int]:
        """Return gamma of every row: 0 where the pass does not read its text to the end, where its
        first token is to be shown as soon as that is done, and where it makes no draft tokens any
        more; else as its policy says."""
        asking = {
            id(row)
            for row, n in zip(rows, reads, strict=True)
            if row.pending <= n and row.records and not row.plain
        }
        tasks = [task for task in self.running if id(task.row) in asking]
        policies = {id(task.gamma): task.gamma for task in tasks}
        if not all(isinstance(policy, Fixed) for policy in policies.values()):
            self.batch.grade()
        gammas: dict[int, int] = {}  # by id of the row
        # Fixed numbers come first: those that are chosen depend on them
        for policy in sorted(policies.values(), key=lambda policy: not isinstance(policy, Fixed)):
            group = [task.row for task in tasks if task.gamma is policy]
            beside = Beside(
                rows=len(tasks) - len(group),
                positions=sum(reads) - len(group) + sum(gammas.values()),
                depth=max(gammas.values(), default=0),
                read=sum(n for row, n in zip(rows, reads, strict=True) if row.pending > 1),
            )
            asked = policy.ask(group, beside)
            if not isinstance(policy, Fixed):  # tokens that a grammar forces cost no draft
                asked = [max(g, free(row)) for g, row in zip(asked, group, strict=True)]
            gammas |= zip(map(id, group), asked, strict=True)
        return [gammas.get(id(row), 0) for row in rows]

    def _admit(self) -> int:
        """Admit waiting rows; return how many of their tokens were prefilled while others run."""
        fresh = self._next()
        if not fresh:
            return 0
        drafts = any(task.drafts for task in fresh)
        if self.running and drafts and not self.batch.drafts:
            # the first rows with draft tokens: the drafter has to read those that run too
            before = self.running
            self._requeue()
            self._join(before, drafts)
        # A prompt that fits the budget is read now, a longer one in pieces beside the steps
        running = sum(task.row.pending == 1 for task in self.running)
        most = self.prefill_budget.most(running, len(self.running) - running + len(fresh))
        budget, now, later = most, list[Task](), list[Task]()
        for task in fresh:
            count = self.batch.unread(task.row)
            fits = count <= budget or not self.running
            (now if fits else later).append(task)
            budget -= count if fits else 0
        self._join(now, drafts)
        self._join(later, drafts, read=False)
        return most - budget if running else 0

    def _next(self) -> list[Task]:
        """Return the waiting rows to admit: the first that there is room and memory for and that
        have the verifier of those that run, as a step has one verifier."""
        room = self.most - len(self.running)
        if self._gathers(room):
            return []
        first = next(chain(self.running, self.waiting), None)
        alike = takewhile(lambda task: first and task.verifier == first.verifier, self.waiting)
        return self._fitting(list(islice(alike, room)))

    def _gathers(self, room: int) -> bool:
        """Tell whether to admit nobody until there is room for more.

        Prefilling one row costs a pass, as prefilling several does, so where more wait than fit,
        a quarter of the batch joins at once. Room is left free for at most `HELD` steps.
        """
        few = self.running and len(self.waiting) > room and room < self.most // SOME
        if few and self._held < HELD:
            self._held += room > 0
            return True
        self._held = 0
        return False

    def _fitting(self, fresh: list[Task]) -> list[Task]:
        """The first of them, as many as memory is enough for."""
        memory, before = self.memory, [task.row for task in self.running]
        while memory and fresh and len(before) + len(fresh) > 1:  # one alone fits
            rows = [*before, *(task.row for task in fresh)]
            if memory.fits(rows, AHEAD + self._most([*self.running, *fresh])):
                break
            fresh = fresh[:-1]
        return fresh

    def _make_room(self) -> None:
        """Rows wait again where memory is too small for another step of all."""
        while self.memory and len(self.running) > 1:
            rows = [task.row for task in self.running]
            if self.memory.fits(rows, self._most(self.running)):
                return
            self.preempt()

    @staticmethod
    def _most(tasks: list[Task]) -> int:
        """Tokens that a step adds to a row at most."""
        return max((task.gamma.most for task in tasks), default=0) + 1

    def _join(self, tasks: list[Task], drafts: bool, *, read: bool = True) -> None:
        """From the queue to the batch; broken off, they are in the queue still. One with media
        joins alone: if these cannot be read, it fails alone."""
        groups = groupby(tasks, lambda task: id(task) if task.row.request.media else None)
        for some in [list(group) for _, group in groups]:
            self.suspects = [task.row for task in some]
            self.batch.join(self.suspects, drafts=drafts, read=read, behind=True)
            waiting = deque(task for task in self.waiting if task not in some)
            self.waiting, self.running = waiting, [*self.running, *some]  # at once

    def _await(self, rows: list[Row]) -> None:
        """Rows that run wait again, before all others of their priority."""
        if not rows:
            return
        again = {id(row) for row in rows}
        tasks = [task for task in self.running if id(task.row) in again]
        others = [task for task in self.running if id(task.row) not in again]
        # at once, for a Ctrl-C in between
        self.waiting, self.running = _sorted([*tasks, *self.waiting]), others
        self.batch.leave(rows)

    def _requeue(self) -> None:
        """All that run wait again, before all others."""
        again = [task for task in self.running if not task.row.finish_reason]
        # at once, for a Ctrl-C in between
        self.waiting, self.running = _sorted([*again, *self.waiting]), []
        self.batch.clear()

    def _now(self) -> float:
        return perf_counter() if self._clock is None else self._clock()

    def _stepping(self) -> bool:
        """Tell whether this very thread is within a step."""
        turn = self._turn and self._turn()
        return turn is not None and not turn.over and turn.thread is current_thread()

    def refuse_inner(self) -> None:
        """RefusedError within a step, which a processor or criterion may be in."""
        if self._stepping():
            raise RefusedError(
                "a processor or criterion generates with the model that it is called for; give it "
                "a model of its own"
            )


def _sorted(tasks: list[Task]) -> deque[Task]:
    """By priority; in their order where that is the same."""
    return deque(sorted(tasks, key=lambda task: -task.priority))


def _unfinished(rows: list[Row]) -> bool:
    return any(row.finish_reason is None for row in rows)
