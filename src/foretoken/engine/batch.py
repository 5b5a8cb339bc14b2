"""The batch: the sequences that run on a target and its drafter. Sequences join and leave between
steps.

The continuation of a sequence is determined by its tokens and key: if the models' caches are lost,
the sequence is prefilled again and continues as before. Waiting sequences are in the scheduler's
queue.
"""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from functools import cache
from itertools import groupby
from time import perf_counter

import torch

from foretoken.drafters.base import Drafter, list_parts, require_separate_parts
from foretoken.drafters.choice import DrafterChoice
from foretoken.drafters.mixture import FirstRowsDrafter, KnownTokensDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import ForetokenError, RefusedError, log_error_kind, to_one_line
from foretoken.lease import Lease
from foretoken.models.base import Model
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS as PASS
from foretoken.request import SequenceState
from foretoken.sampling.distributions import get_working_dtype
from foretoken.sampling.logprobs import logprobs
from foretoken.sampling.verifier import Verifier
from foretoken.step import step

PROMPT_LOGPROBS_CHUNK_TOKENS = 32  # per forward pass: each token needs V logits, much memory


class Batch:
    """A target, its drafter and their sequences. Not thread-safe."""

    def __init__(self, target: Model, drafter: Drafter) -> None:
        require_separate_parts(target, drafter)
        self.target, self.drafter = target, drafter
        self.seqs: list[SequenceState] = []  # seqs[b] is sequence b of the models
        self.prefix_caching_parts = [
            part
            for part in list_parts(target, drafter)
            if isinstance(part, Drafter) or part.capabilities.prefix_cache
        ]
        # the target, if it encodes positions differently in sequences longer than `context`
        self._switching_target = target if target.max_context != target.context else None
        self.drafter_reads_target = any(part.reads_target for part in list_parts(drafter))
        self._lease: Lease | None = None  # held while there are sequences
        self._num_stepped = 0  # rows 0.._num_stepped - 1 have stepped since they joined

    @property
    def outgrown_seqs(self) -> list[SequenceState]:
        """Sequences that are longer than `context` but were not when they joined. They must leave
        and be prefilled again, because the target encodes long sequences differently."""
        if self._switching_target is None:
            return []
        seqs = zip(self.seqs, self._switching_target.long, strict=True)
        return [seq for seq, long in seqs if self._is_long(seq) and not long]

    def _is_long(self, seq: SequenceState) -> bool:
        context = None if self._switching_target is None else self._switching_target.context
        return context is not None and len(seq.tokens) > context

    @property
    def drafts(self) -> bool:
        """True if the sequences of this batch join the drafter as well as the target."""
        none = isinstance(self.drafter, NoDrafter)  # has no cache to join
        return self._lease is not None and (none or self._lease.drafter is self.drafter)

    def join(
        self,
        seqs: list[SequenceState],
        *,
        drafts: bool = True,
        prefill: bool = True,
        defer_drafter: bool = False,
    ) -> None:
        """Add sequences.

        Args:
            seqs: The sequences.
            drafts: False to use no drafter. The value for the first sequences, which join an empty
                batch, applies to all sequences that join later.
            prefill: True prefills all tokens but the last now; the only sequence of a batch may
                leave its last chunk to its first step. False leaves the prefill to later steps.
            defer_drafter: True lets the sequences join the drafter after their first step, which
                then has no draft tokens: the first token does not wait for the drafter's prefill.
        """
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
            if not defer_drafter or self.drafter_reads_target or any(seq.records for seq in seqs):
                self.join_drafter()
                self._join_drafter(self.seqs[self._lease.num_drafted :], [])
        for seq in seqs:
            seq.start_time = seq.start_time or start
            seq.prefill_seconds += seconds

    def step(
        self, verifier: Verifier, gamma: list[int], num_scheduled: list[int] | None = None
    ) -> None:
        """Take a step with at most gamma[b] draft tokens for sequence b, and fewer near the end of
        the sequence. Then remove finished sequences.

        `num_scheduled` is as in `step.step`, but need not complete the prefill of any sequence.
        """
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
        """Set the `grade` of each sequence, which the gamma policy uses, to the predicted grade."""
        if self.drafter.priors and self._lease and self._lease.drafter is self.drafter:
            # strict=False: the last sequences may not have joined the drafter yet
            for seq, grade in zip(self.seqs, self.drafter.predict_grades(), strict=False):
                seq.grade = grade

    @property
    def seqs_awaiting_drafter(self) -> list[SequenceState]:
        """Sequences that have taken a step and have to join the drafter before their next step."""
        return self.seqs[self._lease.num_drafted : self._num_stepped] if self._lease else []

    def join_drafter(self) -> None:
        """Prefill the drafter for `seqs_awaiting_drafter`, including the tokens of their first
        step."""
        seqs = self.seqs_awaiting_drafter
        if seqs:
            with limit_torch_threads(self.target):
                self._join_drafter(seqs, [seq.new_tokens for seq in seqs])

    def count_prefill_tokens(self, seq: SequenceState) -> int:
        """Count the tokens of a joining sequence that are not cached and need a prefill."""
        self._prepare_join(seq)
        return len(seq.tokens) - 1 - self._count_cached(seq.tokens[:-1])

    def leave(self, seqs: list[SequenceState]) -> None:
        """Remove these sequences, finished or not, from the batch and the models."""
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
        """Remove all sequences, also after an interrupted step."""
        _mark_in_batch(self.seqs, False)
        lease, self._lease, self.seqs = self._lease, None, []
        self._num_stepped = 0
        if lease is not None:  # after a Ctrl-C before this line, garbage collection ends the lease
            lease.release()

    def _select_drafter(self, gamma: list[int]) -> Drafter:
        """Return the drafter of this step. For a sequence with predicted or forced tokens, that
        drafter proposes these tokens."""
        assert self._lease is not None and self._lease.drafter is not None
        drafter = self._lease.drafter
        if isinstance(drafter, DrafterChoice):
            drafter.chosen = [seq.grade for seq in self.seqs]
        if self._lease.num_drafted < len(self.seqs):
            drafter = FirstRowsDrafter(drafter, self._lease.num_drafted)
        predicted = [seq.find_predicted_draft(g) for seq, g in zip(self.seqs, gamma, strict=True)]
        limits = zip(predicted, self.seqs, gamma, strict=True)
        draft_tokens = [x or seq.find_forced_tokens(g) for x, seq, g in limits]
        if not any(draft_tokens):
            return drafter
        rows = frozenset(b for b, x in enumerate(draft_tokens) if x)
        return KnownTokensDrafter(drafter, draft_tokens, rows)

    def _group_alike(self, seqs: list[SequenceState]) -> list[list[SequenceState]]:
        """Split sequences into groups that may join in one call: consecutive sequences of the same
        salt that are all longer than `context`, or all not longer."""
        groups = groupby(seqs, lambda seq: (seq.request.salt, self._is_long(seq)))
        return [list(group) for _, group in groups]

    def _copy_sources(self, seqs: list[SequenceState]) -> list[list[int]] | None:
        """Return copies of the encoder inputs, because a drafter may store and modify them; None
        without an encoder."""
        encodes = self.target.encoder_decoder
        return [list(seq.request.source or []) for seq in seqs] if encodes else None

    def _start_target(self, seqs: list[SequenceState], prefill: bool) -> None:
        last = prefill and not self.seqs and len(seqs) == 1 and not self.target.capabilities.tensors
        heads = [self._select_prefill(seq, prefill, last) for seq in seqs]
        encoded = _sum_encoder_seconds(self.target)
        # not the lengths of `heads`: preempted sequences join again with output tokens
        self.target.set_prompt_lengths([len(seq.request.prompt) for seq in seqs])
        _attach_media(self.target, seqs)
        with _refusing_media_errors(seqs):
            self.target.start(heads, self._copy_sources(seqs))
        encoded = _sum_encoder_seconds(self.target) - encoded
        caches = self.target.capabilities.prefix_cache
        num_cached = self.target.num_cached_tokens if caches else [0] * len(seqs)
        for seq, head, count in zip(seqs, heads, num_cached, strict=True):
            seq.num_pending = len(seq.tokens) - len(head)
            # a sequence that joins again finds its own pages, which do not count as cached
            seq.cached = seq.cached if seq.start_time else count
            seq.encoder_seconds += encoded

    def _join_drafter(self, seqs: list[SequenceState], gained: list[list[int]]) -> None:
        """Add `seqs` to the drafter: the first sequences of the batch that are not in it yet. Then
        commit their output tokens `gained` to the drafter; [] if `seqs` have not taken a step."""
        lease = self._lease
        assert lease is not None and lease.drafter is not None
        drafter, before = lease.drafter, lease.num_drafted
        for group in self._group_alike(seqs):
            self._prepare_join(group[0])
            rows = [*range(lease.num_drafted, lease.num_drafted + len(group))]
            prompts = [list(seq.request.prompt if gained else seq.tokens) for seq in group]
            start, encoded = perf_counter(), _sum_encoder_seconds(drafter)
            lease.count_joining(len(group))
            _attach_media(drafter, group)
            with _refusing_media_errors(group):
                drafter.set_output_lengths([0 if gained else len(seq.new_tokens) for seq in group])
                drafter.start(rows, prompts, self._copy_sources(group))
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
        """Return the tokens of a joining sequence that are prefilled now: all but the last token,
        or with `leave_last_chunk` all but the last chunk; without `prefill` only the cached tokens.
        If prompt logprobs are requested, no token is prefilled, because a prefill computes no
        logits."""
        if seq.needs_prompt_logprobs:
            seq.prompt_logprobs = []  # start again: the sequence left before all were computed
            return []
        if (prefill and not leave_last_chunk) or seq.request.media is not None:
            return seq.tokens[:-1]
        cached = self._count_cached(seq.tokens[:-1])
        chunks = (len(seq.tokens) - 1 - cached) // PASS if prefill else 0
        return seq.tokens[: cached + chunks * PASS]

    def _count_cached(self, tokens: list[int]) -> int:
        return self.target.count_cached_tokens(tokens)

    def _limit_gamma(self, seq: SequenceState) -> int:
        """Return the maximum number of draft tokens for a sequence. A token of the target follows
        the draft tokens, and a forward pass must not extend beyond the target's `context`."""
        max_gamma = seq.num_remaining - 1
        if (
            self._switching_target is None
            or self._switching_target.context is None
            or self._is_long(seq)
        ):
            return max_gamma
        return min(max_gamma, self._switching_target.context - len(seq.tokens))

    def _prepare_join(self, seq: SequenceState) -> None:
        """Set the salt and the long-context mode of the models to those of `seq`, which joins
        next."""
        for part in self.prefix_caching_parts:
            part.set_salt(seq.request.salt)
        if self._switching_target is not None:
            self._switching_target.set_long_context(self._is_long(seq))

    def _prefill_chunks(self, num_scheduled: list[int]) -> None:
        """Run a forward pass over the scheduled prompt tokens in a step that completes no
        prefill."""
        blocks = [
            seq.pending_tokens[:count] for seq, count in zip(self.seqs, num_scheduled, strict=True)
        ]
        self.target.score(blocks, [0] * len(blocks))
        for seq, block in zip(self.seqs, blocks, strict=True):
            seq.num_pending -= len(block)
        if self.drafter_reads_target and self._lease and self._lease.drafter:
            self._lease.drafter.commit([[] for _ in self.seqs])  # it takes the hidden states

    @torch.inference_mode()
    def _compute_prompt_logprobs(self, selected: list[bool]) -> None:
        """Score the next prompt chunk of each selected sequence, and append the logprobs of the
        chunk's tokens to the sequence."""
        pairs = zip(selected, self.seqs, strict=True)
        blocks = [
            seq.pending_tokens[:-1][
                : min(PROMPT_LOGPROBS_CHUNK_TOKENS, seq.num_missing_prompt_logprobs)
            ]
            if chosen
            else []
            for chosen, seq in pairs
        ]
        logits = self.target.score(blocks, [len(block) for block in blocks])
        for seq, block, row_logits in zip(self.seqs, blocks, logits, strict=True):
            if block:
                scores = (
                    row_logits[: len(block)].to(get_working_dtype(row_logits.dtype)).log_softmax(-1)
                )
                start = len(seq.tokens) - seq.num_pending + 1
                count = seq.request.params.prompt_logprobs or 0
                likelihoods = logprobs(scores, seq.tokens[start : start + len(block)], count)
                seq.prompt_logprobs, seq.num_pending = (
                    seq.prompt_logprobs + likelihoods,
                    seq.num_pending - len(block),
                )


def _mark_in_batch(seqs: list[SequenceState], present: bool) -> None:
    for seq in seqs:
        seq.in_batch = present


def _attach_media(part: object, seqs: list[SequenceState]) -> None:
    """Set `joining_media`, in each model that accepts media, to the media of `seqs`, which join
    next."""
    media = [seq.request.media for seq in seqs]
    for each in list_parts(part):
        # assigned also if no sequence has media: a failed join may have left media
        if isinstance(each, Model) and each.capabilities.media:
            own = [m if m and each.find_media_problem(m) is None else None for m in media]
            each.joining_media = own if any(own) else []


@contextmanager
def _refusing_media_errors(seqs: list[SequenceState]) -> Generator[None]:
    """Convert an error of a model's own code, raised while sequences with media join, to a
    RefusedError, so that only these sequences fail and others continue."""
    try:
        yield
    except (ForetokenError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        names = {name for seq in seqs if seq.request.media for name in seq.request.media.inputs}
        if not names:
            raise
        reason = f"its code raised {log_error_kind(error)}: {to_one_line(error)}"
        media = ", ".join(sorted(names))
        raise RefusedError(f"the model cannot encode {media}: {reason}") from error


def _sum_encoder_seconds(part: object) -> float:
    return sum(each.encoder_seconds for each in list_parts(part))


@cache
def retain_freed_memory() -> None:
    """Make glibc retain freed memory for later allocations; no effect with other C libraries.

    Otherwise the memory of a step's distributions, some MB, is returned to the system, and in the
    next step the system provides and zeroes it again, which takes 8 of the step's 12 ms for
    distributions `[8, 32000]`. glibc retains twice the size of the largest mapped block that was
    freed so far, counting blocks of at most 32 MB. So a block just below 32 MB is allocated and
    freed here.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


@contextmanager
def limit_torch_threads(target: Model) -> Generator[None]:
    """Limit torch to one thread within the `with` if the target is native: that backend has its
    own threads, and torch's idle threads spin and would take cores from them."""
    count = torch.get_num_threads()
    if target.runtime != "native" or count == 1:
        yield
        return
    try:
        torch.set_num_threads(1)
        yield
    finally:
        torch.set_num_threads(count)
