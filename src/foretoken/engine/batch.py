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

from foretoken.drafters.base import Drafter, parts_of, require_apart
from foretoken.drafters.mixture import FirstRowsDrafter, KnownTokensDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import ForetokenError, RefusedError, kind_of, one_line
from foretoken.lease import Lease
from foretoken.models.base import Model
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS as PASS
from foretoken.request import Row
from foretoken.sampling.distributions import working
from foretoken.sampling.logprobs import logprobs
from foretoken.sampling.verifier import Verifier
from foretoken.step import step

CHUNK = 32  # positions of a prompt in a pass whose logits are all needed: they take much memory


class Batch:
    """A target, its drafter and their rows. For one thread at a time."""

    def __init__(self, target: Model, drafter: Drafter) -> None:
        require_apart(target, drafter)
        self.target, self.drafter = target, drafter
        self.rows: list[Row] = []  # in the models' order
        self.keeping = [
            part
            for part in parts_of(target, drafter)
            if isinstance(part, Drafter) or part.capabilities.prefix_cache
        ]
        # the target, if it reads long rows in another way
        self._switches = target if target.max_context != target.context else None
        self._reads_target = any(part.reads_target for part in parts_of(drafter))
        self._lease: Lease | None = None  # while there are rows
        self._stepped = 0  # of the first rows: they have taken a step since they joined

    @property
    def outgrown(self) -> list[Row]:
        """Rows that have to leave and join again: the target reads so long a text otherwise."""
        if self._switches is None:
            return []
        rows = zip(self.rows, self._switches.long, strict=True)
        return [row for row, long in rows if self._is_long(row) and not long]

    def _is_long(self, row: Row) -> bool:
        context = None if self._switches is None else self._switches.context
        return context is not None and len(row.tokens) > context

    @property
    def drafts(self) -> bool:
        """True where its rows are in the drafter too."""
        none = isinstance(self.drafter, NoDrafter)  # where there is nothing to be in
        return self._lease is not None and (none or self._lease.drafter is self.drafter)

    def join(
        self, rows: list[Row], *, drafts: bool = True, read: bool = True, behind: bool = False
    ) -> None:
        """Rows join, with all but their last tokens read; or, without `read`, with nothing: steps
        read it. A row that is alone has as much of its end left as fits a pass, which the first
        step's is then. The first ones say whether there will be guesses: plain decoding costs no
        drafter's work. behind: fresh rows join the drafter behind their first step, which then
        drafts nothing for them: no first token waits for it."""
        if self._lease is None:
            self._lease = Lease(self.target, self.drafter if drafts else NoDrafter())
            self._lease.take()
            keep_freed()
        start = perf_counter()
        with threads(self.target):
            for some in self._alike(rows):
                self._announce(some[0])
                self._start(some, read)
                self.rows = [*self.rows, *some]
                _mark_in_batch(some, True)
            seconds = perf_counter() - start
            if not behind or self._reads_target or any(row.records for row in rows):
                self.join_drafter()
                self._join_drafter(self.rows[self._lease.drafted :], [])
        for row in rows:
            row.began = row.began or start
            row.prefill_seconds += seconds

    def step(self, verifier: Verifier, gamma: list[int], reads: list[int] | None = None) -> None:
        """Advance the rows, by `gamma` draft tokens at most, which are trimmed near their ends;
        those that finish leave. `reads`: as `step.step` takes them, but all rows may keep something
        for later."""
        assert self._lease is not None and self._lease.drafter is not None
        reads = [row.pending for row in self.rows] if reads is None else reads
        telling = [row.telling for row in self.rows]
        reads = [0 if t else count for t, count in zip(telling, reads, strict=True)]
        open_ = [row.pending <= count for row, count in zip(self.rows, reads, strict=True)]
        limits = zip(gamma, open_, self.rows, strict=True)
        trimmed = [min(g, self._most(row)) if ready else 0 for g, ready, row in limits]
        self.join_drafter()
        with threads(self.target):
            if any(telling):
                self._tell(telling)
            if any(open_):
                step(self.rows, self.target, self._given_drafter(trimmed), verifier, trimmed, reads)
            else:
                self._read(reads)
        for row in self.rows:
            row.seconds = perf_counter() - row.began
            if row.records and not row.first_seconds:
                row.first_seconds = row.read_seconds = row.seconds
        self._stepped = len(self.rows)
        self.leave([row for row in self.rows if row.finish_reason])

    def grade(self) -> None:
        """Note in each row how far its next draft tokens are to be trusted, before their number is
        chosen."""
        if self.drafter.priors and self._lease and self._lease.drafter is self.drafter:
            # rows that have not joined it yet keep what they have
            for row, grade in zip(self.rows, self.drafter.grades(), strict=False):
                row.grade = grade

    @property
    def undrafted(self) -> list[Row]:
        """Rows that have taken a step, and that the drafter is to read before the next one."""
        return self.rows[self._lease.drafted : self._stepped] if self._lease else []

    def join_drafter(self) -> None:
        """They join the drafter with their prompts, and go on by what they have gained since."""
        rows = self.undrafted
        if rows:
            with threads(self.target):
                self._join_drafter(rows, [row.new_tokens for row in rows])

    def unread(self, row: Row) -> int:
        """Count the tokens of a joining row that need a prefill."""
        self._announce(row)
        return len(row.tokens) - 1 - self._known(row.tokens[:-1])

    def leave(self, rows: list[Row]) -> None:
        """Rows leave, finished or not."""
        leaving = {id(row) for row in rows}
        places = [b for b, row in enumerate(self.rows) if id(row) in leaving]
        if self._lease is not None and places:
            self._lease.leave(places)
            self._stepped -= sum(b < self._stepped for b in places)
            _mark_in_batch(rows, False)
            self.rows = [row for row in self.rows if id(row) not in leaving]
        if not self.rows:
            self.clear()

    def clear(self) -> None:
        """All rows leave, also where a step was broken off."""
        _mark_in_batch(self.rows, False)
        lease, self._lease, self.rows = self._lease, None, []
        self._stepped = 0
        if lease is not None:  # broken off here, it ends with its last reference
            lease.release()

    def _given_drafter(self, gamma: list[int]) -> Drafter:
        """The drafter, behind what rows have without one."""
        assert self._lease is not None and self._lease.drafter is not None
        drafter = self._lease.drafter
        if self._lease.drafted < len(self.rows):
            drafter = FirstRowsDrafter(drafter, self._lease.drafted)
        pairs = zip(self.rows, gamma, strict=True)
        predicted = [row.predicted(g) if g and row.trusts else [] for row, g in pairs]
        every = zip(predicted, self.rows, gamma, strict=True)
        draft_tokens = [x or row.forced(g) for x, row, g in every]
        if not any(draft_tokens):
            return drafter
        places = frozenset(b for b, x in enumerate(draft_tokens) if x)
        return KnownTokensDrafter(drafter, draft_tokens, places)

    def _alike(self, rows: list[Row]) -> list[list[Row]]:
        """Rows that join at once: neighbours of the same salt, which are read in the same way."""
        groups = groupby(rows, lambda row: (row.request.salt, self._is_long(row)))
        return [list(some) for _, some in groups]

    def _sources(self, rows: list[Row]) -> list[list[int]] | None:
        """Copies, which a drafter may keep and add to."""
        encodes = self.target.encoder_decoder
        return [list(row.request.source or []) for row in rows] if encodes else None

    def _start(self, rows: list[Row], read: bool) -> None:
        last = read and not self.rows and len(rows) == 1 and not self.target.capabilities.tensors
        heads = [self._head(row, read, last) for row in rows]
        encoded = _encoded(self.target)
        # rows that join again have written some
        self.target.set_prompt_lengths([len(row.request.prompt) for row in rows])
        _attach(self.target, rows)
        with _reading(rows):
            self.target.start(heads, self._sources(rows))
        encoded = _encoded(self.target) - encoded
        caches = self.target.capabilities.prefix_cache
        recalled = self.target.num_cached_tokens if caches else [0] * len(rows)
        for row, head, k in zip(rows, heads, recalled, strict=True):
            row.pending = len(row.tokens) - len(head)
            row.cached = row.cached if row.began else k  # its own pages are not others'
            row.encoder_seconds += encoded

    def _join_drafter(self, rows: list[Row], gained: list[list[int]]) -> None:
        """The first rows that are not in the drafter yet join there, without what they gained."""
        lease = self._lease
        assert lease is not None and lease.drafter is not None
        drafter, before = lease.drafter, lease.drafted
        for some in self._alike(rows):
            self._announce(some[0])
            places = [*range(lease.drafted, lease.drafted + len(some))]
            texts = [list(row.request.prompt if gained else row.tokens) for row in some]
            start, encoded = perf_counter(), _encoded(drafter)
            lease.expect(len(some))
            _attach(drafter, some)
            with _reading(some):
                drafter.start(places, texts, self._sources(some))
            seconds, encoded = perf_counter() - start, _encoded(drafter) - encoded
            for row in some:
                row.draft_encoder_seconds += encoded
                row.draft_prefill_seconds += seconds
                if gained:
                    row.read_seconds = perf_counter() - row.began
        if gained:
            drafter.commit([*([] for _ in range(before)), *gained])

    def _head(self, row: Row, read: bool, last: bool) -> list[int]:
        """Return the tokens of a joining row that are prefilled at once: all but the last token, or
        but the `last` forward, or those that need no prefill; none of a prompt whose logprobs are
        asked for, which a prefill does not give."""
        if row.telling:
            row.prompt_logprobs = []  # of a reading broken off
            return []
        if (read and not last) or row.request.media is not None:
            return row.tokens[:-1]
        cached = self._known(row.tokens[:-1])
        passes = (len(row.tokens) - 1 - cached) // PASS if read else 0
        return row.tokens[: cached + passes * PASS]

    def _known(self, text: list[int]) -> int:
        """Count the first tokens whose keys and values the target has kept from other texts."""
        return self.target.count_cached_tokens(text)

    def _most(self, row: Row) -> int:
        """Guesses that a row has a use for: behind them comes a token of the target's own, and the
        target reads all of a pass in one way."""
        most = row.room - 1
        if self._switches is None or self._switches.context is None or self._is_long(row):
            return most
        return min(most, self._switches.context - len(row.tokens))

    def _announce(self, row: Row) -> None:
        """The rows that join next are like this one: only texts of the same salt serve them."""
        for part in self.keeping:
            part.set_salt(row.request.salt)
        if self._switches is not None:
            self._switches.set_long_context(self._is_long(row))

    def _read(self, reads: list[int]) -> None:
        """A pass in which no row is advanced."""
        blocks = [row.unread[:count] for row, count in zip(self.rows, reads, strict=True)]
        self.target.score(blocks, [0] * len(blocks))
        for row, block in zip(self.rows, blocks, strict=True):
            row.pending -= len(block)

    @torch.inference_mode()
    def _tell(self, telling: list[bool]) -> None:
        """A pass over the next tokens of prompts whose logprobs are asked for."""
        unread = zip(telling, self.rows, strict=True)
        blocks = [row.unread[:-1][: min(CHUNK, row.untold)] if t else [] for t, row in unread]
        logits = self.target.score(blocks, [len(block) for block in blocks])
        for row, block, row_logits in zip(self.rows, blocks, logits, strict=True):
            if block:
                scores = row_logits[: len(block)].to(working(row_logits.dtype)).log_softmax(-1)
                at = len(row.tokens) - row.pending + 1
                count = row.request.params.prompt_logprobs or 0
                likelihoods = logprobs(scores, row.tokens[at : at + len(block)], count)
                row.prompt_logprobs, row.pending = (
                    row.prompt_logprobs + likelihoods,
                    row.pending - len(block),
                )


def _mark_in_batch(rows: list[Row], present: bool) -> None:
    for row in rows:
        row.in_batch = present


def _attach(part: object, rows: list[Row]) -> None:
    """Hand the media of rows that are about to join to the models that can read them."""
    media = [row.request.media for row in rows]
    for each in parts_of(part):
        # what a join that failed has left goes, too
        if isinstance(each, Model) and each.capabilities.media:
            own = [m if m and each.find_media_problem(m) is None else None for m in media]
            each.joining_media = own if any(own) else []


@contextmanager
def _reading(rows: list[Row]) -> Generator[None]:
    """Rows join; where a model's code raises anything over their media, that is refused, as other
    rows have nothing to do with it."""
    try:
        yield
    except (ForetokenError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        names = {name for row in rows if row.request.media for name in row.request.media.inputs}
        if not names:
            raise
        reason = f"its code raised {kind_of(error)}: {one_line(error)}"
        raise RefusedError(f"the model cannot read {', '.join(sorted(names))}: {reason}") from error


def _encoded(part: object) -> float:
    """Seconds that encoders in a model or drafter have run so far."""
    return sum(each.encoder_seconds for each in parts_of(part))


@cache
def keep_freed() -> None:
    """Let glibc keep some memory that is freed for whoever asks next. Elsewhere nothing changes.

    Otherwise the memory that a step frees, some MB of distributions, goes back to the system and is
    zeroed anew in the next one, 8 of 12 ms at eight rows of 32,000. It keeps twice the largest
    block that was ever mapped by itself and freed, if no larger than 32 MB.
    """
    torch.empty(2**25 - 2**16, dtype=torch.uint8)


@contextmanager
def threads(target: Model) -> Generator[None]:
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
