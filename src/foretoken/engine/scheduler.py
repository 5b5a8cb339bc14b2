"""The scheduler: decides which sequences run and which wait, by priority, then in order of arrival.

A long prompt is prefilled in chunks alongside the running sequences, so that no running sequence
stalls. Not thread-safe.
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

JOIN_FRACTION = 4  # sequences wait until a quarter of the batch can join at once
MAX_DEFERRED_STEPS = 8  # maximum number of steps for which sequences wait for that reason
# Free memory that admission requires, in tokens per sequence: with less, the sequence that joined
# last would soon be preempted
LOOKAHEAD_TOKENS = 64


@dataclass(frozen=True, slots=True, eq=False)
class SequenceTask:
    """A sequence with its verifier and gamma policy."""

    seq: SequenceState
    verifier: Verifier
    gamma: GammaPolicy
    priority: int = 0  # higher is admitted first

    @property
    def drafts(self) -> bool:
        return self.gamma != FixedGamma(0)


@dataclass(frozen=True, slots=True)
class ScheduledStep:
    """The next step of all sequences of the batch."""

    seqs: list[SequenceState]
    num_scheduled: list[int]  # tokens of each sequence to score, without draft tokens
    gamma: list[int]
    verifier: Verifier
    scores_prompts: bool  # for prompt logprobs, in a forward pass of its own


class Scheduler:
    """The queue of waiting sequences, and the batch of at most `max_rows` running sequences."""

    def __init__(self, batch: Batch, max_rows: int) -> None:
        self.batch, self.max_rows = batch, max_rows
        self.waiting: deque[SequenceTask] = deque()
        self.running: list[SequenceTask] = []  # in the order of the batch's rows
        # sequences of the last join or step: if that fails, these sequences fail
        self.suspects: list[SequenceState] = []
        self.prefill_budget = PrefillBudget()
        self.memory: KVCacheBudget | None = None  # None: no limit
        self.preempted = 0  # times that a sequence was preempted for lack of memory
        self._deferred_steps = 0  # steps taken while admission was deferred

    def set_limits(self, max_rows: int, memory: KVCacheBudget | None) -> None:
        """Set the limits on running sequences and their memory, and reset `preempted`."""
        self.max_rows, self.memory, self.preempted = max_rows, memory, 0

    def add(self, tasks: list[SequenceTask]) -> None:
        """Add sequences to the queue. Raises InputError if a sequence can never fit into memory."""
        for task in tasks:
            if self.memory is not None:
                self.memory.require_fit(task.seq)
        self.waiting = _sort_by_priority([*self.waiting, *tasks])

    def schedule(self) -> ScheduledStep | None:
        """Admit and preempt sequences and return the next step; None if no sequence runs."""
        # different only if an interrupt came between the updates of the two lists
        if [task.seq for task in self.running] != self.batch.seqs:
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
        if self.batch.drafter_reads_target:
            # a sequence that joins again leaves its last token to a step of its own, because to
            # draft then needs the hidden states of the tokens before
            pairs = zip(seqs, num_scheduled, strict=True)
            num_scheduled = [
                min(n, max(1, seq.num_pending - 1)) if seq.records else n for seq, n in pairs
            ]
        return ScheduledStep(
            seqs,
            num_scheduled,
            self._choose_gammas(seqs, num_scheduled),
            self.running[0].verifier,
            any(seq.needs_prompt_logprobs for seq in seqs),
        )

    def remove_finished(self) -> None:
        """Remove finished sequences, which have left the batch."""
        self.running = [
            task for task in self.running if task.seq.status is not SequenceStatus.FINISHED
        ]

    def fail(self, error: RefusedError) -> None:
        """Finish, with this error, the sequences that joined or ran last, and remove them."""
        for seq in self.suspects:
            if seq.status is not SequenceStatus.FINISHED:
                seq.fail(error)
        self.drop(self.suspects)

    def preempt(self) -> None:
        """Move the youngest running sequence of the lowest priority back to the queue, ahead of the
        waiting sequences of its priority."""
        last = min(reversed(self.running), key=lambda task: task.priority)
        self._return_to_queue([last.seq])
        self.preempted += 1

    def drop(self, seqs: list[SequenceState]) -> None:
        """Remove these sequences from the queue or the batch."""
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
        """Move all running sequences back to the queue, ahead of the waiting sequences of their
        priority."""
        again = [task for task in self.running if task.seq.status is not SequenceStatus.FINISHED]
        # one assignment: a Ctrl-C between two assignments would lose or duplicate sequences
        self.waiting, self.running = _sort_by_priority([*again, *self.waiting]), []
        self.batch.clear()

    def _choose_gammas(self, seqs: list[SequenceState], num_scheduled: list[int]) -> list[int]:
        """Return the gamma that each sequence's policy chooses. Gamma is 0 if the sequence stays in
        prefill, if its drafting is disabled, and in its first step, so that the first token does
        not wait for the drafter."""
        drafting = {
            id(seq)
            for seq, n in zip(seqs, num_scheduled, strict=True)
            if seq.num_pending <= n and seq.records and not seq.drafting_disabled
        }
        tasks = [task for task in self.running if id(task.seq) in drafting]
        policies = {id(task.gamma): task.gamma for task in tasks}
        if not all(isinstance(policy, FixedGamma) for policy in policies.values()):
            self.batch.update_grades()
        gammas: dict[int, int] = {}  # by id of the SequenceState
        shared = self._list_shared(seqs, num_scheduled)
        # Fixed policies first: an adaptive choice depends on the work of the other sequences
        for policy in sorted(
            policies.values(), key=lambda policy: not isinstance(policy, FixedGamma)
        ):
            group = [task.seq for task in tasks if task.gamma is policy]
            other_work = OtherWork(
                num_seqs=len(tasks) - len(group),
                positions=sum(n for _, n in shared) - len(group) + sum(gammas.values()),
                depth=max(gammas.values(), default=0),
                width=max(1, *(n for _, n in shared), *(1 + g for g in gammas.values())),
                prefill_positions=sum(n for seq, n in shared if seq.num_pending > 1),
            )
            chosen = policy.choose_gammas(group, other_work)
            if not isinstance(policy, FixedGamma):  # a grammar's forced tokens need no drafter
                chosen = [
                    max(g, count_forced_tokens(seq)) for g, seq in zip(chosen, group, strict=True)
                ]
            gammas |= zip(map(id, group), chosen, strict=True)
        return [gammas.get(id(seq), 0) for seq in seqs]

    def _list_shared(
        self, seqs: list[SequenceState], num_scheduled: list[int]
    ) -> list[tuple[SequenceState, int]]:
        """Return the sequences with a block in the forward pass that draft tokens lengthen, and the
        number of their scheduled tokens. The target may run long pieces of prompts in passes of
        their own, whose time does not depend on gamma."""
        limit = self.batch.target.max_shared_width
        pairs = zip(seqs, num_scheduled, strict=True)
        return [(seq, n) for seq, n in pairs if limit is None or n <= limit]

    def _admit(self) -> int:
        """Admit waiting sequences to the batch. Return the number of their tokens that were
        prefilled now and count against this step's prefill budget; 0 if no other sequence runs."""
        fresh = self._select_waiting()
        if not fresh:
            return 0
        drafts = any(task.drafts for task in fresh)
        if self.running and drafts and not self.batch.drafts:
            # the first sequences that use the drafter: running ones must join the drafter too
            before = self.running
            self.requeue()
            self._join(before, drafts)
        # A prompt that fits the budget is prefilled now, a longer one in chunks in later steps
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
        """Return the waiting sequences to admit: the first sequences that fit into batch and memory
        and have the verifier of the running sequences, because a step has one verifier."""
        room = self.max_rows - len(self.running)
        if self._should_defer(room):
            return []
        first = next(chain(self.running, self.waiting), None)
        alike = takewhile(lambda task: first and task.verifier == first.verifier, self.waiting)
        return self._limit_to_memory(list(islice(alike, room)))

    def _should_defer(self, room: int) -> bool:
        """Return whether to admit no sequence until there is room for more.

        Sequences that join together share the forward passes of their prefill. So if more sequences
        wait than fit, no sequence is admitted until a quarter of the batch is free, but for at most
        `MAX_DEFERRED_STEPS` steps.
        """
        few = self.running and len(self.waiting) > room and room < self.max_rows // JOIN_FRACTION
        if few and self._deferred_steps < MAX_DEFERRED_STEPS:
            self._deferred_steps += room > 0
            return True
        self._deferred_steps = 0
        return False

    def _limit_to_memory(self, fresh: list[SequenceTask]) -> list[SequenceTask]:
        """Return the first of the `fresh` sequences, as many as fit into memory in addition to the
        running sequences."""
        memory, before = self.memory, [task.seq for task in self.running]
        while memory and fresh and len(before) + len(fresh) > 1:  # `add` checked single sequences
            seqs = [*before, *(task.seq for task in fresh)]
            if memory.fits(seqs, LOOKAHEAD_TOKENS + self._max_step_tokens([*self.running, *fresh])):
                break
            fresh = fresh[:-1]
        return fresh

    def _make_room(self) -> None:
        """Preempt sequences until memory suffices for the next step of the other sequences."""
        while self.memory and len(self.running) > 1:
            seqs = [task.seq for task in self.running]
            if self.memory.fits(seqs, self._max_step_tokens(self.running)):
                return
            self.preempt()

    @staticmethod
    def _max_step_tokens(tasks: list[SequenceTask]) -> int:
        return max((task.gamma.max_gamma for task in tasks), default=0) + 1

    def _join(self, tasks: list[SequenceTask], drafts: bool, *, prefill: bool = True) -> None:
        """Move sequences from the queue to the batch; if an error interrupts the move, they are
        still in the queue. A sequence with media joins alone, so that no other sequence fails if
        its media are invalid."""
        groups = groupby(tasks, lambda task: id(task) if task.seq.request.media else None)
        for joining in [list(group) for _, group in groups]:
            self.suspects = [task.seq for task in joining]
            self.batch.join(self.suspects, drafts=drafts, prefill=prefill, defer_drafter=True)
            waiting = deque(task for task in self.waiting if task not in joining)
            self.waiting, self.running = waiting, [*self.running, *joining]  # as in `requeue`

    def _return_to_queue(self, seqs: list[SequenceState]) -> None:
        """Move these running sequences back to the queue, ahead of the waiting sequences of their
        priority."""
        if not seqs:
            return
        again = {id(seq) for seq in seqs}
        tasks = [task for task in self.running if id(task.seq) in again]
        others = [task for task in self.running if id(task.seq) not in again]
        # one assignment, as in `requeue`
        self.waiting, self.running = _sort_by_priority([*tasks, *self.waiting]), others
        self.batch.leave(seqs)


def _sort_by_priority(tasks: list[SequenceTask]) -> deque[SequenceTask]:
    """Return a queue sorted by priority; tasks of equal priority stay in order."""
    return deque(sorted(tasks, key=lambda task: -task.priority))
