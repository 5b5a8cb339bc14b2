"""The only loop over sequences: schedule, step, postprocess.

`Speculator.generate`, `Engine`, `AsyncEngine` and the server add sequences to this loop and take
its steps, from any number of threads. A step advances all running sequences. If Ctrl-C or an error
interrupts a step, its sequences return to the queue and are prefilled again, which changes no
output.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator
from contextlib import contextmanager
from threading import RLock, Thread, current_thread
from time import perf_counter, sleep

from foretoken.costing.gamma import GammaPolicy
from foretoken.drafters.base import Drafter, iter_parts, list_parts
from foretoken.engine.batch import Batch
from foretoken.engine.memory import KVCacheBudget, reserve_prefix_cache
from foretoken.engine.scheduler import ScheduledStep, Scheduler, SequenceTask
from foretoken.errors import NumericsError, RefusedError
from foretoken.lease import disengage, engage
from foretoken.models.base import Model
from foretoken.request import SequenceState
from foretoken.sampling.verifier import Verifier

LOGGER = logging.getLogger(__name__)
LOCK_YIELD_SECONDS = 0.01  # maximum wait between steps, in which other threads get the lock


class EngineCore:
    """Generates with a target and a drafter, at most `max_rows` sequences at a time. Thread-safe.

    `clock` is the function that measures the time of steps; None is `perf_counter`.
    """

    def __init__(
        self,
        target: Model,
        drafter: Drafter,
        max_rows: int,
        *,
        clock: Callable[[], float] | None = None,
    ) -> None:
        self.batch = Batch(target, drafter)
        self.scheduler = Scheduler(self.batch, max_rows)
        self._clock = clock or (lambda: perf_counter())
        # reentrant: if a stream is garbage-collected within a step, it aborts in the same thread
        self._lock = RLock()
        self._waiting_threads: set[Thread] = set()  # threads that wait for the lock
        self._stepping = False  # True while the thread that holds the lock takes a step
        self._aborted: list[SequenceState] = []

    def add(self, tasks: list[SequenceTask]) -> None:
        """Add sequences to the queue. Raises InputError if a sequence can never fit into memory."""
        self.refuse_reentry()
        with self._hold_lock():
            self.scheduler.add(tasks)

    def step(self) -> bool:
        """Advance all running sequences; return whether there were any. If an error interrupts the
        step, its sequences return to the queue and the error is raised."""
        self.refuse_reentry()
        self._yield_lock()
        with self._hold_lock():
            return self._step()

    def run(
        self, seqs: list[SequenceState], verifier: Verifier, gamma: GammaPolicy
    ) -> Generator[None]:
        """Add sequences and take steps until these sequences are finished; yield after each step.

        Raises the errors of `step`. After an error, or if the generator is closed, unfinished
        sequences are aborted.
        """
        try:
            self.add([SequenceTask(seq, verifier, gamma) for seq in seqs])
            unfinished = True
            while unfinished:
                self.refuse_reentry()
                self._yield_lock()
                with self._hold_lock():  # other threads may have finished the sequences
                    unfinished = any(seq.finish_reason is None for seq in seqs)
                    if unfinished:
                        self._step()
                yield
        finally:
            self.abort(seqs)

    def abort(self, seqs: list[SequenceState]) -> None:
        """Abort these sequences, waiting or running; finished sequences are ignored. If this thread
        is within a step, the sequences are removed after the step."""
        seqs = [seq for seq in seqs if seq.finish_reason is None]
        self._aborted += seqs
        if seqs and not self._within_step():
            with self._hold_lock():
                self._drop_aborted()

    def fail(self, error: RefusedError) -> None:
        """Fail the sequences that joined or ran in the step that raised `error`."""
        with self._hold_lock():
            self.scheduler.fail(error)

    def preempt(self) -> None:
        """Move a running sequence back to the queue: the sequence that would also be preempted
        first for lack of memory."""
        with self._hold_lock():
            self.scheduler.preempt()

    @property
    def is_unused(self) -> bool:
        """True if no sequence runs or waits."""
        return not self.scheduler.running and not self.scheduler.waiting

    @contextmanager
    def pause(self) -> Generator[None]:
        """Block steps of other threads within the `with`, so that no sequence changes while the
        caller reads it."""
        with self._hold_lock():
            yield

    @contextmanager
    def release_models(self) -> Generator[None]:
        """Remove all sequences from the models and block steps within the `with`; running sequences
        are prefilled again later."""
        self.refuse_reentry()
        with self._hold_lock():
            self.scheduler.requeue()
            yield

    def configure(self, max_rows: int, memory: int | None, *, cache_prefixes: bool) -> None:
        """Configure for an `Engine`: at most `max_rows` running sequences, `memory` bytes of KV
        cache (None: no limit), and a prefix cache or no prefix cache. Raises InputError if the
        models have an engine already, and the errors of `KVCacheBudget`."""
        parts = [*iter_parts(self.batch.target), *iter_parts(self.batch.drafter)]
        engage(parts, self)
        try:
            with self.release_models():
                components = list_parts(self.batch.target, self.batch.drafter)
                kv_budget = None if memory is None else KVCacheBudget(components, memory)
                if kv_budget is not None:
                    kv_budget.reserve()
                elif cache_prefixes:
                    reserve_prefix_cache(self.batch.prefix_caching_parts)
                self._set_prefix_caching(cache_prefixes)
                self.scheduler.set_limits(max_rows, kv_budget)
        except BaseException:
            disengage(parts, self)
            raise

    def reset(self, max_rows: int) -> None:
        """Undo `configure`: free the models for another engine, and run at most `max_rows`
        sequences at a time from then on."""
        with self.release_models():
            disengage([*iter_parts(self.batch.target), *iter_parts(self.batch.drafter)], self)
            self.scheduler.set_limits(max_rows, None)
            self._set_prefix_caching(False)

    def refuse_reentry(self) -> None:
        """Raise RefusedError if this thread is within a step, which means that a user's logits
        processor or stopping criterion called the engine."""
        if self._within_step():
            raise RefusedError(
                "a logits processor or stopping criterion generates with the model that calls it; "
                "load another model for the processor or criterion"
            )

    def _step(self) -> bool:
        self._stepping = True
        try:
            scheduled = self.scheduler.schedule()
            if scheduled is None:
                return False
            start = self._clock()
            self._execute(scheduled)
            self._postprocess(scheduled, self._clock() - start)
            return True
        except BaseException:
            self.scheduler.requeue()
            raise
        finally:
            self._stepping = False
            self._drop_aborted()

    def _execute(self, scheduled: ScheduledStep) -> None:
        try:
            self.batch.step(scheduled.verifier, scheduled.gamma, scheduled.num_scheduled)
        except NumericsError as error:
            if error.row is None:
                raise
            drafted = scheduled.gamma[error.row] > 0
            handle_nonfinite(scheduled.seqs[error.row], error, drafted=drafted)
            self.scheduler.requeue()  # the other sequences repeat the step

    def _postprocess(self, scheduled: ScheduledStep, seconds: float) -> None:
        if not scheduled.scores_prompts:  # those steps run a second forward pass
            self.scheduler.prefill_budget.record_step(scheduled.num_scheduled, seconds)
        self.scheduler.remove_finished()

    def _drop_aborted(self) -> None:
        if self._aborted:
            aborted, self._aborted = self._aborted, []
            self.scheduler.drop(aborted)

    def _set_prefix_caching(self, on: bool) -> None:
        for part in self.batch.prefix_caching_parts:
            part.set_prefix_caching(on)

    def _within_step(self) -> bool:
        return self._stepping and self._has_lock()

    def _has_lock(self) -> bool:
        return self._lock._is_owned()  # pyright: ignore

    @contextmanager
    def _hold_lock(self) -> Generator[None]:
        thread, outermost = current_thread(), not self._has_lock()
        self._waiting_threads.add(thread)
        try:
            with self._lock:
                self._waiting_threads.discard(thread)
                if outermost:  # a Ctrl-C may have left this flag set
                    self._stepping = False
                yield
        finally:
            self._waiting_threads.discard(thread)

    def _yield_lock(self) -> None:
        """Let waiting threads take the lock first, as Python's locks are not fair."""
        until = perf_counter() + LOCK_YIELD_SECONDS
        while self._waiting_threads and perf_counter() < until:
            sleep(LOCK_YIELD_SECONDS / 10)


def handle_nonfinite(seq: SequenceState, error: NumericsError, *, drafted: bool) -> None:
    """Fail a sequence with invalid logits, unless its draft tokens may be the cause.

    Attention sums over all positions of a forward pass and 0 * NaN is NaN, so a draft token with
    invalid keys and values corrupts the target's logits at earlier positions too. Such a sequence
    repeats the step without draft tokens, and continues without them. In the draft model, the
    invalid keys and values of a rejected draft token corrupt logits in the same way if the forward
    pass of a longer sequence includes their slots. So if the draft model's logits are invalid, the
    sequence is prefilled again and repeats the step once.
    """
    if drafted and error.whose == "target":
        seq.drafting_disabled = True
        LOGGER.warning("%s; the sequence continues without draft tokens", error)
    elif drafted and seq.last_retry_length < len(seq.tokens):
        seq.last_retry_length = len(seq.tokens)
    else:
        seq.fail(error)
