"""Which sequences run and which wait: first come, first served, by priority.

A long prompt is prefilled in chunks beside the sequences that run, so that none of them stalls. For
one thread at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain, groupby, islice, takewhile

from foretoken.costing.gamma import Beside, Fixed, Gamma, free
from foretoken.engine.batch import Batch
from foretoken.engine.memory import Memory
from foretoken.engine.prefill_budget import PrefillBudget
from foretoken.errors import RefusedError
from foretoken.request import Row, RowState
from foretoken.sampling.verifier import Verifier

JOIN_FRACTION = 4  # a quarter of the batch joins at once,
MAX_DEFERRED_STEPS = 8  # or what there is room for so many steps later
LOOKAHEAD_TOKENS = 64  # that sequences may gain before the one that joins last has to leave again


@dataclass(frozen=True, slots=True, eq=False)
class Task:
    """A sequence with its verifier and gamma policy."""

    row: Row
    verifier: Verifier
    gamma: Gamma
    priority: int = 0  # those of a greater one go first

    @property
    def drafts(self) -> bool:
        return self.gamma != Fixed(0)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step that is about to be taken, of all rows of the batch."""

    rows: list[Row]
    reads: list[int]  # tokens that each row's block holds besides draft tokens
    gamma: list[int]
    verifier: Verifier
    scores_prompts: bool  # in a pass of its own, for logprobs of prompts


class Scheduler:
    """The queue before a batch, of which at most `max_rows` run."""

    def __init__(self, batch: Batch, max_rows: int) -> None:
        self.batch, self.max_rows = batch, max_rows
        self.waiting: deque[Task] = deque()
        self.running: list[Task] = []  # as the batch's rows
        self.suspects: list[Row] = []  # that joined or ran last: one of them, if that failed
        self.prefill_budget = PrefillBudget()
        self.memory: Memory | None = None  # None: as much as the rows need
        self.preempted = 0  # rows that had to wait again, as memory ran short
        self._deferred_steps = 0  # for which places were left free

    def limit(self, max_rows: int, memory: Memory | None) -> None:
        """Run at most `max_rows` sequences within this memory, from now on."""
        self.max_rows, self.memory, self.preempted = max_rows, memory, 0

    def add(self, tasks: list[Task]) -> None:
        """Put sequences behind those that wait. Raises InputError where memory is too small for one
        of them."""
        for task in tasks:
            if self.memory is not None:
                self.memory.require(task.row)
        self.waiting = _sorted([*self.waiting, *tasks])

    def schedule(self) -> ScheduledStep | None:
        """Let sequences join and leave the batch, and return its next step; None where no sequence
        runs or can run."""
        if [task.row for task in self.running] != self.batch.rows:  # broken off in between
            self.requeue()
        self._await(self.batch.outgrown)
        already = self._admit()
        if not self.running:
            return None
        self._make_room()
        self.suspects = self.batch.undrafted
        self.batch.join_drafter()
        rows = self.suspects = list(self.batch.rows)
        reads = self.prefill_budget.reads(rows, already)
        return ScheduledStep(
            rows,
            reads,
            self._gamma(rows, reads),
            self.running[0].verifier,
            any(row.telling for row in rows),
        )

    def remove_finished(self) -> None:
        """Forget finished sequences, which have left the batch."""
        self.running = [task for task in self.running if task.row.state is not RowState.FINISHED]

    def fail(self, error: RefusedError) -> None:
        """Fail the sequences that joined or ran last."""
        for row in self.suspects:
            if row.state is not RowState.FINISHED:
                row.fail(error)
        self.drop(self.suspects)

    def preempt(self) -> None:
        """Let the youngest of the running sequences of the least priority wait again, before all
        others of its priority."""
        last = min(reversed(self.running), key=lambda task: task.priority)
        self._await([last.row])
        self.preempted += 1

    def drop(self, rows: list[Row]) -> None:
        """Forget sequences, waiting or running."""
        gone = {id(row) for row in rows}
        self.waiting = deque(task for task in self.waiting if id(task.row) not in gone)
        leaving = [task.row for task in self.running if id(task.row) in gone]
        if leaving:
            self.running = [task for task in self.running if id(task.row) not in gone]
            try:
                self.batch.leave(leaving)
            except BaseException:
                self.requeue()
                raise

    def requeue(self) -> None:
        """Let all sequences that run wait again, before all others."""
        again = [task for task in self.running if task.row.state is not RowState.FINISHED]
        # at once, for a Ctrl-C in between
        self.waiting, self.running = _sorted([*again, *self.waiting]), []
        self.batch.clear()

    def _gamma(self, rows: list[Row], reads: list[int]) -> list[int]:
        """Return gamma of every row: 0 while its prompt is prefilled, where its first token is to
        be shown as soon as that is done, and where it makes no draft tokens any more; else as its
        policy says."""
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
            # the first rows with draft tokens: the drafter has to prefill those that run too
            before = self.running
            self.requeue()
            self._join(before, drafts)
        # A prompt that fits the budget is prefilled now, a longer one in chunks beside the steps
        running = sum(task.row.state is RowState.RUNNING for task in self.running)
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
        room = self.max_rows - len(self.running)
        if self._defers(room):
            return []
        first = next(chain(self.running, self.waiting), None)
        alike = takewhile(lambda task: first and task.verifier == first.verifier, self.waiting)
        return self._fitting(list(islice(alike, room)))

    def _defers(self, room: int) -> bool:
        """Tell whether to admit nobody until there is room for more.

        A prefill of one row costs a pass, as one of several does, so where more wait than fit, a
        quarter of the batch joins at once. Room is left free for `MAX_DEFERRED_STEPS` at most.
        """
        few = self.running and len(self.waiting) > room and room < self.max_rows // JOIN_FRACTION
        if few and self._deferred_steps < MAX_DEFERRED_STEPS:
            self._deferred_steps += room > 0
            return True
        self._deferred_steps = 0
        return False

    def _fitting(self, fresh: list[Task]) -> list[Task]:
        """The first of them, as many as memory is enough for."""
        memory, before = self.memory, [task.row for task in self.running]
        while memory and fresh and len(before) + len(fresh) > 1:  # one alone fits
            rows = [*before, *(task.row for task in fresh)]
            if memory.fits(rows, LOOKAHEAD_TOKENS + self._most([*self.running, *fresh])):
                break
            fresh = fresh[:-1]
        return fresh

    def _make_room(self) -> None:
        """Preempt where memory is too small for another step of all."""
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
        """Let rows that run wait again, before all others of their priority."""
        if not rows:
            return
        again = {id(row) for row in rows}
        tasks = [task for task in self.running if id(task.row) in again]
        others = [task for task in self.running if id(task.row) not in again]
        # at once, for a Ctrl-C in between
        self.waiting, self.running = _sorted([*tasks, *self.waiting]), others
        self.batch.leave(rows)


def _sorted(tasks: list[Task]) -> deque[Task]:
    """By priority; in their order where that is the same."""
    return deque(sorted(tasks, key=lambda task: -task.priority))
