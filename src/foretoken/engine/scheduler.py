"""Which sequences run and which wait: first come, first served, by priority.

A long prompt is prefilled in chunks beside the sequences that run, so that none of them stalls. For
one thread at a time.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from itertools import chain, groupby, islice, takewhile

from foretoken.costing.gamma import FixedGamma, GammaPolicy, OtherWork, count_forced_tokens
from foretoken.engine.batch import Batch
from foretoken.engine.memory import KVCacheBudget
from foretoken.engine.prefill_budget import PrefillBudget
from foretoken.errors import RefusedError
from foretoken.request import SequenceState, SequenceStatus
from foretoken.sampling.verifier import Verifier

JOIN_FRACTION = 4  # a quarter of the batch joins at once,
MAX_DEFERRED_STEPS = 8  # or what there is room for so many steps later
LOOKAHEAD_TOKENS = 64  # that sequences may gain before the one that joins last has to leave again


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTask:
    """A sequence with its verifier and gamma policy."""

    seq: SequenceState
    verifier: Verifier
    gamma: GammaPolicy
    priority: int = 0  # those of a greater one go first

    @property
    def drafts(self) -> bool:
        return self.gamma != FixedGamma(0)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """A step that is about to be taken, of all rows of the batch."""

    seqs: list[SequenceState]
    num_scheduled: list[int]  # tokens that each row's block holds besides draft tokens
    gamma: list[int]
    verifier: Verifier
    scores_prompts: bool  # in a pass of its own, for logprobs of prompts


class Scheduler:
    """The queue before a batch, of which at most `max_rows` run."""

    def __init__(self, batch: Batch, max_rows: int) -> None:
        self.batch, self.max_rows = batch, max_rows
        self.waiting: deque[SequenceTask] = deque()
        self.running: list[SequenceTask] = []  # as the batch's rows
        self.suspects: list[
            SequenceState
        ] = []  # that joined or ran last: one of them, if that failed
        self.prefill_budget = PrefillBudget()
        self.memory: KVCacheBudget | None = None  # None: as much as the rows need
        self.preempted = 0  # rows that had to wait again, as memory ran short
        self._deferred_steps = 0  # for which places were left free

    def set_limits(self, max_rows: int, memory: KVCacheBudget | None) -> None:
        """Run at most `max_rows` sequences within this memory, from now on."""
        self.max_rows, self.memory, self.preempted = max_rows, memory, 0

    def add(self, tasks: list[SequenceTask]) -> None:
        """Put sequences behind those that wait. Raises InputError where memory is too small for one
        of them."""
        for task in tasks:
            if self.memory is not None:
                self.memory.require_fit(task.seq)
        self.waiting = _sort_by_priority([*self.waiting, *tasks])

    def schedule(self) -> ScheduledStep | None:
        """Let sequences join and leave the batch, and return its next step; None where no sequence
        runs or can run."""
        if [task.seq for task in self.running] != self.batch.seqs:  # broken off in between
            self.requeue()
        self._return_to_queue(self.batch.outgrown_seqs)
        already = self._admit()
        if not self.running:
            return None
        self._make_room()
        self.suspects = self.batch.seqs_awaiting_drafter
        self.batch.join_drafter()
        seqs = self.suspects = list(self.batch.seqs)
        num_scheduled = self.prefill_budget.schedule_tokens(seqs, already)
        return ScheduledStep(
            seqs,
            num_scheduled,
            self._choose_gammas(seqs, num_scheduled),
            self.running[0].verifier,
            any(seq.needs_prompt_logprobs for seq in seqs),
        )

    def remove_finished(self) -> None:
        """Forget finished sequences, which have left the batch."""
        self.running = [
            task for task in self.running if task.seq.status is not SequenceStatus.FINISHED
        ]

    def fail(self, error: RefusedError) -> None:
        """Fail the sequences that joined or ran last."""
        for seq in self.suspects:
            if seq.status is not SequenceStatus.FINISHED:
                seq.fail(error)
        self.drop(self.suspects)

    def preempt(self) -> None:
        """Let the youngest of the running sequences of the least priority wait again, before all
        others of its priority."""
        last = min(reversed(self.running), key=lambda task: task.priority)
        self._return_to_queue([last.seq])
        self.preempted += 1

    def drop(self, seqs: list[SequenceState]) -> None:
        """Forget sequences, waiting or running."""
        gone = {id(seq) for seq in seqs}
        self.waiting = deque(task for task in self.waiting if id(task.seq) not in gone)
        leaving = [task.seq for task in self.running if id(task.seq) in gone]
        if leaving:
            self.running = [task for task in self.running if id(task.seq) not in gone]
            try:
                self.batch.leave(leaving)
            except BaseException:
                self.requeue()
                raise

    def requeue(self) -> None:
        """Let all sequences that run wait again, before all others."""
        again = [task for task in self.running if task.seq.status is not SequenceStatus.FINISHED]
        # at once, for a Ctrl-C in between
        self.waiting, self.running = _sort_by_priority([*again, *self.waiting]), []
        self.batch.clear()

    def _choose_gammas(self, seqs: list[SequenceState], num_scheduled: list[int]) -> list[int]:
        """Return gamma of every row: 0 while its prompt is prefilled, where its first token is to
        be shown as soon as that is done, and where it makes no draft tokens any more; else as its
        policy says."""
        asking = {
            id(seq)
            for seq, n in zip(seqs, num_scheduled, strict=True)
            if seq.num_pending <= n and seq.records and not seq.drafting_disabled
        }
        tasks = [task for task in self.running if id(task.seq) in asking]
        policies = {id(task.gamma): task.gamma for task in tasks}
        if not all(isinstance(policy, FixedGamma) for policy in policies.values()):
            self.batch.update_grades()
        gammas: dict[int, int] = {}  # by id of the row
        # Fixed numbers come first: those that are chosen depend on them
        for policy in sorted(
            policies.values(), key=lambda policy: not isinstance(policy, FixedGamma)
        ):
            group = [task.seq for task in tasks if task.gamma is policy]
            other_work = OtherWork(
                num_seqs=len(tasks) - len(group),
                positions=sum(num_scheduled) - len(group) + sum(gammas.values()),
                depth=max(gammas.values(), default=0),
                prefill_positions=sum(
                    n for seq, n in zip(seqs, num_scheduled, strict=True) if seq.num_pending > 1
                ),
            )
            asked = policy.choose_gammas(group, other_work)
            if not isinstance(policy, FixedGamma):  # tokens that a grammar forces cost no draft
                asked = [
                    max(g, count_forced_tokens(seq)) for g, seq in zip(asked, group, strict=True)
                ]
            gammas |= zip(map(id, group), asked, strict=True)
        return [gammas.get(id(seq), 0) for seq in seqs]

    def _admit(self) -> int:
        """Admit waiting rows; return how many of their tokens were prefilled while others run."""
        fresh = self._select_waiting()
        if not fresh:
            return 0
        drafts = any(task.drafts for task in fresh)
        if self.running and drafts and not self.batch.drafts:
            # the first rows with draft tokens: the drafter has to prefill those that run too
            before = self.running
            self.requeue()
            self._join(before, drafts)
        # A prompt that fits the budget is prefilled now, a longer one in chunks beside the steps
        running = sum(task.seq.status is SequenceStatus.RUNNING for task in self.running)
        max_tokens = self.prefill_budget.compute_budget(
            running, len(self.running) - running + len(fresh)
        )
        budget, now, later = max_tokens, list[SequenceTask](), list[SequenceTask]()
        for task in fresh:
            count = self.batch.count_prefill_tokens(task.seq)
            fits = count <= budget or not self.running
            (now if fits else later).append(task)
            budget -= count if fits else 0
        self._join(now, drafts)
        self._join(later, drafts, prefill=False)
        return max_tokens - budget if running else 0

    def _select_waiting(self) -> list[SequenceTask]:
        """Return the waiting rows to admit: the first that there is room and memory for and that
        have the verifier of those that run, as a step has one verifier."""
        room = self.max_rows - len(self.running)
        if self._should_defer(room):
            return []
        first = next(chain(self.running, self.waiting), None)
        alike = takewhile(lambda task: first and task.verifier == first.verifier, self.waiting)
        return self._limit_to_memory(list(islice(alike, room)))

    def _should_defer(self, room: int) -> bool:
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

    def _limit_to_memory(self, fresh: list[SequenceTask]) -> list[SequenceTask]:
        """The first of them, as many as memory is enough for."""
        memory, before = self.memory, [task.seq for task in self.running]
        while memory and fresh and len(before) + len(fresh) > 1:  # one alone fits
            seqs = [*before, *(task.seq for task in fresh)]
            if memory.fits(seqs, LOOKAHEAD_TOKENS + self._max_step_tokens([*self.running, *fresh])):
                break
            fresh = fresh[:-1]
        return fresh

    def _make_room(self) -> None:
        """Preempt where memory is too small for another step of all."""
        while self.memory and len(self.running) > 1:
            seqs = [task.seq for task in self.running]
            if self.memory.fits(seqs, self._max_step_tokens(self.running)):
                return
            self.preempt()

    @staticmethod
    def _max_step_tokens(tasks: list[SequenceTask]) -> int:
        """Tokens that a step adds to a row at most."""
        return max((task.gamma.max_gamma for task in tasks), default=0) + 1

    def _join(self, tasks: list[SequenceTask], drafts: bool, *, prefill: bool = True) -> None:
        """From the queue to the batch; broken off, they are in the queue still. One with media
        joins alone: if these cannot be read, it fails alone."""
        groups = groupby(tasks, lambda task: id(task) if task.seq.request.media else None)
        for some in [list(group) for _, group in groups]:
            self.suspects = [task.seq for task in some]
            self.batch.join(self.suspects, drafts=drafts, prefill=prefill, defer_drafter=True)
            waiting = deque(task for task in self.waiting if task not in some)
            self.waiting, self.running = waiting, [*self.running, *some]  # at once

    def _return_to_queue(self, seqs: list[SequenceState]) -> None:
        """Let rows that run wait again, before all others of their priority."""
        if not seqs:
            return
        again = {id(seq) for seq in seqs}
        tasks = [task for task in self.running if id(task.seq) in again]
        others = [task for task in self.running if id(task.seq) not in again]
        # at once, for a Ctrl-C in between
        self.waiting, self.running = _sort_by_priority([*tasks, *self.waiting]), others
        self.batch.leave(seqs)


def _sort_by_priority(tasks: list[SequenceTask]) -> deque[SequenceTask]:
    """By priority; in their order where that is the same."""
    return deque(sorted(tasks, key=lambda task: -task.priority))
