"""The one loop over sequences: schedule, step, postprocess.

`Speculator.generate`, `Engine`, `AsyncEngine` and the server all add sequences to it and take its
steps, from any number of threads; a step advances all sequences that run. Where a step breaks off,
by Ctrl-C or an error, its sequences wait and are prefilled again, which changes no output.
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
LOCK_YIELD_SECONDS = 0.01  # a thread that takes steps waits for others that want the lock, at most


class EngineCore:
    """Sequences of a target and a drafter, at most `max_rows` at a time. clock: the seconds that
    steps are timed by, where these are not the process's own."""

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
        self._lock = RLock()  # a stream that is collected within a step aborts in the same thread
        self._waiting_threads: set[Thread] = set()  # for the lock
        self._stepping = False  # by the thread that has the lock
        self._aborted: list[SequenceState] = []

    def add(self, tasks: list[SequenceTask]) -> None:
        """Put sequences behind those that wait. Raises InputError where memory is too small for one
        of them."""
        self.refuse_reentry()
        with self._hold_lock():
            self.scheduler.add(tasks)

    def step(self) -> bool:
        """Advance all sequences that run; return whether any did. Raises the error that broke the
        step off: its sequences then wait again."""
        self.refuse_reentry()
        self._yield_lock()
        with self._hold_lock():
            return self._step()

    def run(
        self, seqs: list[SequenceState], verifier: Verifier, gamma: GammaPolicy
    ) -> Generator[None]:
        """Add sequences and take steps until all of these are finished; yields whenever they may
        have advanced. Raises what a step raises; unfinished ones are then dropped, as they are when
        the generator is closed."""
        try:
            self.add([SequenceTask(seq, verifier, gamma) for seq in seqs])
            unfinished = True
            while unfinished:
                self.refuse_reentry()
                self._yield_lock()
                with self._hold_lock():  # another thread's steps may have finished them
                    unfinished = any(seq.finish_reason is None for seq in seqs)
                    if unfinished:
                        self._step()
                yield
        finally:
            self.abort(seqs)

    def abort(self, seqs: list[SequenceState]) -> None:
        """Drop these sequences, waiting or running; finished ones are ignored. Within a step, they
        are dropped after it."""
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
        """Let the sequence that runs and would be preempted first wait again."""
        with self._hold_lock():
            self.scheduler.preempt()

    @property
    def is_unused(self) -> bool:
        """True where no sequence runs or waits."""
        return not self.scheduler.running and not self.scheduler.waiting

    @contextmanager
    def pause(self) -> Generator[None]:
        """Take no step meanwhile, so that sequences can be looked at."""
        with self._hold_lock():
            yield

    @contextmanager
    def release_models(self) -> Generator[None]:
        """Free the models of all sequences meanwhile; those that ran are prefilled again later."""
        self.refuse_reentry()
        with self._hold_lock():
            self.scheduler.requeue()
            yield

    def configure(self, max_rows: int, memory: int | None, *, cache_prefixes: bool) -> None:
        """Become an engine's: run at most `max_rows` sequences within `memory` bytes (None: what
        they need); keep: cache prefixes. Raises InputError where the models have an engine, and as
        `KVCacheBudget`."""
        parts = [*iter_parts(self.batch.target), *iter_parts(self.batch.drafter)]
        engage(parts, self)
        try:
            with self.release_models():
                own = list_parts(self.batch.target, self.batch.drafter)
                kv_budget = None if memory is None else KVCacheBudget(own, memory)
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
        """Belong to no engine any more."""
        with self.release_models():
            disengage([*iter_parts(self.batch.target), *iter_parts(self.batch.drafter)], self)
            self.scheduler.set_limits(max_rows, None)
            self._set_prefix_caching(False)

    def refuse_reentry(self) -> None:
        """Raise RefusedError within a step, which a processor or criterion may be in."""
        if self._within_step():
            raise RefusedError(
                "a processor or criterion generates with the model that it is called for; give it "
                "a model of its own"
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
            self.scheduler.requeue()  # the others take the step again

    def _postprocess(self, scheduled: ScheduledStep, seconds: float) -> None:
        if not scheduled.scores_prompts:  # which takes a pass of its own
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
        """Tell whether this thread is taking a step."""
        return self._stepping and self._has_lock()

    def _has_lock(self) -> bool:
        return self._lock._is_owned()  # pyright: ignore

    @contextmanager
    def _hold_lock(self) -> Generator[None]:
        me, outermost = current_thread(), not self._has_lock()
        self._waiting_threads.add(me)
        try:
            with self._lock:
                self._waiting_threads.discard(me)
                if outermost:  # a Ctrl-C may have left it set
                    self._stepping = False
                yield
        finally:
            self._waiting_threads.discard(me)

    def _yield_lock(self) -> None:
        """Let threads that wait for the lock have it first: Python's locks are not fair."""
        until = perf_counter() + LOCK_YIELD_SECONDS
        while self._waiting_threads and perf_counter() < until:
            sleep(LOCK_YIELD_SECONDS / 10)


def handle_nonfinite(seq: SequenceState, error: NumericsError, *, drafted: bool) -> None:
    """Fail a sequence with invalid logits, unless its draft tokens may be the cause.

    Attention sums over all positions of a pass and 0 * NaN is NaN, so a draft token with invalid
    keys and values spoils the target's logits before it too. Such a sequence takes the step again,
    and all later ones, without draft tokens. In the draft, invalid keys that a rejected draft token
    has left do the same where a longer sequence's pass reaches them: the sequence takes the step
    again once, over what is then prefilled again.
    """
    if drafted and error.whose == "target":
        seq.drafting_disabled = True
        LOGGER.warning("%s; the sequence goes on without draft tokens", error)
    elif drafted and seq.last_retry_length < len(seq.tokens):
        seq.last_retry_length = len(seq.tokens)
    else:
        seq.fail(error)
