"""Rows in a target and its drafter, which join and leave between steps.

A row's whole state is its tokens and its key, so whatever becomes of the models' caches, it can be
read anew and goes on as it would have. Knows no queue.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from time import perf_counter

import torch

from foretoken.drafters.base import Drafter, list_parts, require_separate_parts
from foretoken.drafters.mixture import FirstRowsDrafter, KnownTokensDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import ForetokenError, RefusedError, log_error_kind, to_one_line
from foretoken.lease import Lease
from foretoken.models.base import Model
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS as PASS
from foretoken.request import SequenceState
from foretoken.sampling.distributions import working_dtype
from foretoken.sampling.logprobs import logprobs
from foretoken.sampling.verifier import Verifier
from foretoken.step import step

PROMPT_LOGPROBS_CHUNK_TOKENS = (
    32  # positions of a prompt in a pass whose logits are all needed: they take much memory
)


class Batch:
    """A target, its drafter and their rows. For one thread at a time."""

    def __init__(self, target: Model, drafter: Drafter) -> None:
        require_separate_parts(target, drafter)
        self.target, self.drafter = target, drafter
        self.seqs: list[SequenceState] = []  # in the models' order
        self.prefix_caching_parts = [
            part
            for part in list_parts(target, drafter)
            if isinstance(part, Drafter) or part.capabilities.prefix_cache
        ]
        # the target, if it reads long rows in another way
        self._switching_target = target if target.max_context != target.context else None
        self._drafter_reads_target = any(part.reads_target for part in list_parts(drafter))
        self._lease: Lease | None = None  # while there are rows
        self._num_stepped = 0  # of the first rows: they have taken a step since they joined

    @property
    def outgrown_seqs(self) -> list[SequenceState]:
        """Rows that have to leave and join again: the target reads so long a text otherwise."""
        if self._switching_target is None:
            return []
        seqs = zip(self.seqs, self._switching_target.long, strict=True)
        return [seq for seq, long in seqs if self._is_long(seq) and not long]

    def _is_long(self, seq: SequenceState) -> bool:
        context = None if self._switching_target is None else self._switching_target.context
        return context is not None and len(seq.tokens) > context

    @property
    def drafts(self) -> bool:
        """True where its rows are in the drafter too."""
        none = isinstance(self.drafter, NoDrafter)  # where there is nothing to be in
        return self._lease is not None and (none or self._lease.drafter is self.drafter)

    def join(
        self,
        seqs: list[SequenceState],
        *,
        drafts: bool = True,
        prefill: bool = True,
        defer_drafter: bool = False,
    ) -> None:
        """Rows join, with all but their last tokens read; or, without `read`, with nothing: steps
        read it. A row that is alone has as much of its end left as fits a pass, which the first
        step's is then. The first ones say whether there will be guesses: plain decoding costs no
        drafter's work. behind: fresh rows join the drafter behind their first step, which then
        drafts nothing for them: no first token waits for it."""
        if self._lease is None:
            self._lease = Lease(self.target, self.drafter if drafts else NoDrafter())
            self._lease.acquire()
            retain_freed_memory()
        start = perf_counter()
        with limit_torch_threads(self.target):
            for group in self._group_alike(seqs):
                self._prepare_join(group[0])
                self._start_target(group, prefill)
                self.seqs = [*self.seqs, *group]
                _mark_in_batch(group, True)
            seconds = perf_counter() - start
            if not defer_drafter or self._drafter_reads_target or any(seq.records for seq in seqs):
                self.join_drafter()
                self._join_drafter(self.seqs[self._lease.num_drafted :], [])
        for seq in seqs:
            seq.start_time = seq.start_time or start
            seq.prefill_seconds += seconds

    def step(
        self, verifier: Verifier, gamma: list[int], num_scheduled: list[int] | None = None
    ) -> None:
        """Advance the rows, by `gamma` draft tokens at most, which are trimmed near their ends;
        those that finish leave. `num_scheduled`: as `step.step` takes them, but all rows may keep
        something for later."""
        assert self._lease is not None and self._lease.drafter is not None
        num_scheduled = (
            [seq.num_pending for seq in self.seqs] if num_scheduled is None else num_scheduled
        )
        scored = [seq.needs_prompt_logprobs for seq in self.seqs]
        num_scheduled = [0 if t else count for t, count in zip(scored, num_scheduled, strict=True)]
        complete = [
            seq.num_pending <= count for seq, count in zip(self.seqs, num_scheduled, strict=True)
        ]
        limits = zip(gamma, complete, self.seqs, strict=True)
        trimmed = [min(g, self._limit_gamma(seq)) if ready else 0 for g, ready, seq in limits]
        self.join_drafter()
        with limit_torch_threads(self.target):
            if any(scored):
                self._compute_prompt_logprobs(scored)
            if any(complete):
                step(
                    self.seqs,
                    self.target,
                    self._select_drafter(trimmed),
                    verifier,
                    trimmed,
                    num_scheduled,
                )
            else:
                self._prefill_chunks(num_scheduled)
        for seq in self.seqs:
            seq.seconds = perf_counter() - seq.start_time
            if seq.records and not seq.first_seconds:
                seq.first_seconds = seq.prefill_end_seconds = seq.seconds
        self._num_stepped = len(self.seqs)
        self.leave([seq for seq in self.seqs if seq.finish_reason])

    def update_grades(self) -> None:
        """Note in each row how far its next draft tokens are to be trusted, before their number is
        chosen."""
        if self.drafter.priors and self._lease and self._lease.drafter is self.drafter:
            # rows that have not joined it yet keep what they have
            for seq, grade in zip(self.seqs, self.drafter.predict_grades(), strict=False):
                seq.grade = grade

    @property
    def seqs_awaiting_drafter(self) -> list[SequenceState]:
        """Rows that have taken a step, and that the drafter is to read before the next one."""
        return self.seqs[self._lease.num_drafted : self._num_stepped] if self._lease else []

    def join_drafter(self) -> None:
        """They join the drafter with their prompts, and go on by what they have gained since."""
        seqs = self.seqs_awaiting_drafter
        if seqs:
            with limit_torch_threads(self.target):
                self._join_drafter(seqs, [seq.new_tokens for seq in seqs])

    def count_prefill_tokens(self, seq: SequenceState) -> int:
        """Count the tokens of a joining row that need a prefill."""
        self._prepare_join(seq)
        return len(seq.tokens) - 1 - self._count_cached(seq.tokens[:-1])

    def leave(self, seqs: list[SequenceState]) -> None:
        """Rows leave, finished or not."""
        leaving = {id(seq) for seq in seqs}
        leaving_rows = [b for b, seq in enumerate(self.seqs) if id(seq) in leaving]
        if self._lease is not None and leaving_rows:
            self._lease.leave(leaving_rows)
            self._num_stepped -= sum(b < self._num_stepped for b in leaving_rows)
            _mark_in_batch(seqs, False)
            self.seqs = [seq for seq in self.seqs if id(seq) not in leaving]
        if not self.seqs:
            self.clear()

    def clear(self) -> None:
        """All rows leave, also where a step was broken off."""
        _mark_in_batch(self.seqs, False)
        lease, self._lease, self.seqs = self._lease, None, []
        self._num_stepped = 0
        if lease is not None:  # broken off here, it ends with its last reference
            lease.release()

    def _select_drafter(self, gamma: list[int]) -> Drafter:
        """The drafter, behind what rows have without one."""
        assert self._lease is not None and self._lease.drafter is not None
        drafter = self._lease.drafter
        if self._lease.num_drafted < len(self.seqs):
            drafter = FirstRowsDrafter(drafter, self._lease.num_drafted)
        pairs = zip(self.seqs, gamma, strict=True)
        predicted = [seq.predict_tokens(g) if g and seq.uses_prediction else [] for seq, g in pairs]
        every = zip(predicted, self.seqs, gamma, strict=True)
        draft_tokens = [x or seq.find_forced_tokens(g) for x, seq, g in every]
        if not any(draft_tokens):
            return drafter
        places = frozenset(b for b, x in enumerate(draft_tokens) if x)
        return KnownTokensDrafter(drafter, draft_tokens, places)

    def _group_alike(self, seqs: list[SequenceState]) -> list[list[SequenceState]]:
        """Rows that join at once: neighbours of the same salt, which are read in the same way."""
        groups = groupby(seqs, lambda seq: (seq.request.salt, self._is_long(seq)))
        return [list(some) for _, some in groups]

    def _copy_sources(self, seqs: list[SequenceState]) -> list[list[int]] | None:
        """Copies, which a drafter may keep and add to."""
        encodes = self.target.encoder_decoder
        return [list(seq.request.source or []) for seq in seqs] if encodes else None

    def _start_target(self, seqs: list[SequenceState], prefill: bool) -> None:
        last = prefill and not self.seqs and len(seqs) == 1 and not self.target.capabilities.tensors
        heads = [self._select_prefill(seq, prefill, last) for seq in seqs]
        encoded = _sum_encoder_seconds(self.target)
        # rows that join again have written some
        self.target.set_prompt_lengths([len(seq.request.prompt) for seq in seqs])
        _attach_media(self.target, seqs)
        with _refusing_media_errors(seqs):
            self.target.start(heads, self._copy_sources(seqs))
        encoded = _sum_encoder_seconds(self.target) - encoded
        caches = self.target.capabilities.prefix_cache
        recalled = self.target.num_cached_tokens if caches else [0] * len(seqs)
        for seq, head, k in zip(seqs, heads, recalled, strict=True):
            seq.num_pending = len(seq.tokens) - len(head)
            seq.cached = seq.cached if seq.start_time else k  # its own pages are not others'
            seq.encoder_seconds += encoded

    def _join_drafter(self, seqs: list[SequenceState], gained: list[list[int]]) -> None:
        """The first rows that are not in the drafter yet join there, without what they gained."""
        lease = self._lease
        assert lease is not None and lease.drafter is not None
        drafter, before = lease.drafter, lease.num_drafted
        for group in self._group_alike(seqs):
            self._prepare_join(group[0])
            places = [*range(lease.num_drafted, lease.num_drafted + len(group))]
            prompts = [list(seq.request.prompt if gained else seq.tokens) for seq in group]
            start, encoded = perf_counter(), _sum_encoder_seconds(drafter)
            lease.count_joining(len(group))
            _attach_media(drafter, group)
            with _refusing_media_errors(group):
                drafter.start(places, prompts, self._copy_sources(group))
            seconds, encoded = perf_counter() - start, _sum_encoder_seconds(drafter) - encoded
            for seq in group:
                seq.draft_encoder_seconds += encoded
                seq.draft_prefill_seconds += seconds
                if gained:
                    seq.prefill_end_seconds = perf_counter() - seq.start_time
        if gained:
            drafter.commit([*([] for _ in range(before)), *gained])

    def _select_prefill(
        self, seq: SequenceState, prefill: bool, leave_last_chunk: bool
    ) -> list[int]:
        """Return the tokens of a joining row that are prefilled at once: all but the last token, or
        but the `last` forward, or those that need no prefill; none of a prompt whose logprobs are
        asked for, which a prefill does not give."""
        if seq.needs_prompt_logprobs:
            seq.prompt_logprobs = []  # of a reading broken off
            return []
        if (prefill and not leave_last_chunk) or seq.request.media is not None:
            return seq.tokens[:-1]
        cached = self._count_cached(seq.tokens[:-1])
        passes = (len(seq.tokens) - 1 - cached) // PASS if prefill else 0
        return seq.tokens[: cached + passes * PASS]

    def _count_cached(self, tokens: list[int]) -> int:
        """Count the first tokens whose keys and values the target has kept from other texts."""
        return self.target.count_cached_tokens(tokens)

    def _limit_gamma(self, seq: SequenceState) -> int:
        """Guesses that a row has a use for: behind them comes a token of the target's own, and the
        target reads all of a pass in one way."""
        max_gamma = seq.num_remaining - 1
        if (
            self._switching_target is None
            or self._switching_target.context is None
            or self._is_long(seq)
        ):
            return max_gamma
        return min(max_gamma, self._switching_target.context - len(seq.tokens))

    def _prepare_join(self, seq: SequenceState) -> None:
        """The rows that join next are like this one: only texts of the same salt serve them."""
        for part in self.prefix_caching_parts:
            part.set_salt(seq.request.salt)
        if self._switching_target is not None:
            self._switching_target.set_long_context(self._is_long(seq))

    def _prefill_chunks(self, num_scheduled: list[int]) -> None:
        """A pass in which no row is advanced."""
        blocks = [
            seq.pending_tokens[:count] for seq, count in zip(self.seqs, num_scheduled, strict=True)
        ]
        self.target.score(blocks, [0] * len(blocks))
        for seq, block in zip(self.seqs, blocks, strict=True):
            seq.num_pending -= len(block)

    @torch.inference_mode()
    def _compute_prompt_logprobs(self, selected: list[bool]) -> None:
        """A pass over the next tokens of prompts whose logprobs are asked for."""
        unread = zip(selected, self.seqs, strict=True)
        blocks = [
            seq.pending_tokens[:-1][
                : min(PROMPT_LOGPROBS_CHUNK_TOKENS, seq.num_missing_prompt_logprobs)
            ]
            if t
            else []
            for t, seq in unread
        ]
        logits = self.target.score(blocks, [len(block) for block in blocks])
        for seq, block, row_logits in zip(self.seqs, blocks, logits, strict=True):
            if block:
                scores = (
                    row_logits[: len(block)].to(working_dtype(row_logits.dtype)).log_softmax(-1)
                )
                at = len(seq.tokens) - seq.num_pending + 1
                count = seq.request.params.prompt_logprobs or 0
                likelihoods = logprobs(scores, seq.tokens[at : at + len(block)], count)
                seq.prompt_logprobs, seq.num_pending = (
                    seq.prompt_logprobs + likelihoods,
                    seq.num_pending - len(block),
                )


def _mark_in_batch(seqs: list[SequenceState], present: bool) -> None:
    for seq in seqs:
        seq.in_batch = present


def _attach_media(part: object, seqs: list[SequenceState]) -> None:
    """Hand the media of rows that are about to join to the models that can read them."""
    media = [seq.request.media for seq in seqs]
    for each in list_parts(part):
        # what a join that failed has left goes, too
        if isinstance(each, Model) and each.capabilities.media:
            own = [m if m and each.find_media_problem(m) is None else None for m in media]
            each.joining_media = own if any(own) else []


@contextmanager
def _refusing_media_errors(seqs: list[SequenceState]) -> Generator[None]:
    """Rows join; where a model's code raises anything over their media, that is refused, as other
    rows have nothing to do with it."""
    try:
        yield
    except (ForetokenError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        names = {name for seq in seqs if seq.request.media for name in seq.request.media.inputs}
        if not names:
            raise
        reason = f"its code raised {log_error_kind(error)}: {to_one_line(error)}"
        raise RefusedError(f"the model cannot read {', '.join(sorted(names))}: {reason}") from error


def _sum_encoder_seconds(part: object) -> float:
    """Seconds that encoders in a model or drafter have run so far."""
    return sum(each.encoder_seconds for each in list_parts(part))


@cache
def retain_freed_memory() -> None:
    """Let glibc keep some memory that is freed for whoever asks next. Elsewhere nothing changes.

    Otherwise the memory that a step frees, some MB of distributions, goes back to the system and is
    zeroed anew in the next one, 8 of 12 ms at eight rows of 32,000. It keeps twice the largest
    block that was ever mapped by itself and freed, if no larger than 32 MB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


@contextmanager
def limit_torch_threads(target: Model) -> Generator[None]:
    """Torch on one thread while the target runs in a library with threads of its own: torch's idle
    threads spin, and would take the cores from it. Outside the `with` torch has the caller's
    setting."""
    count = torch.get_num_threads()
    if target.runtime != "native" or count == 1:
        yield
        return
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(count)
