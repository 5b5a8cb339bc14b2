"""A decoder on the native kernels, as a Model.

A row is pages and a length; rollback is a smaller length, a fork or a shared prefix the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from ctypes import pointer
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.errors import RefusedError
from foretoken.kernels.library import PairsRecord, WeightRecord, chosen_set, library
from foretoken.models.base import (
    Blocks,
    Capabilities,
    ChainedTokens,
    Model,
    PairModel,
    TokenChoice,
)
from foretoken.models.native.description import weight_record
from foretoken.models.native.pages import PAGE, PagedRow, PagePool
from foretoken.models.native.passes import KINDS, DraftChain, NativePasses, RowPart
from foretoken.models.native.recurrent_states import RecurrentStates
from foretoken.models.prefixes import PrefixCache, shared
from foretoken.models.rows import check_lengths, check_room, staying
from foretoken.models.shown import Known, Shown
from foretoken.models.states import REWIND

MOST_STORED = 2**28  # bytes of recurrent states behind prefixes
LEAST = PAGE  # tokens that sequences must share


class Unshared:
    """The salt of a row whose pages follow from more than its tokens."""


class NativeModel(Model):
    """A Model over `passes`, batch-invariant by its arithmetic."""

    capabilities = Capabilities(
        batch_invariant=True, prefix_cache=True, memory=True, hidden=True, taps=True, chain=True
    )
    runtime = "native"

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        self.passes = passes
        self.vocab_size = passes.vocab_size
        self.context = facts["context"]
        self._longest = facts.get("longest")
        self.identity = facts.get("identity")
        self.computed: str = facts.get("computed", "float32")
        self.pool = PagePool(passes.layout, "float16" if passes.facts["halved"] else "float32")
        self.rows: list[PagedRow] = []
        # recurrent states behind prefixes, for rows that begin with them
        self.stored: PrefixCache | None = None
        self.texts: list[list[int]] = []  # whose keys and values are there
        self.salts: list[Hashable] = []
        self.salt = ""  # of the rows that join next
        self.recalled: list[int] = []  # tokens of the rows that joined last
        self.rewind = None if passes.states is None else REWIND
        self.taps = passes.taps
        self._seen = Shown()  # states there, until they are taken
        # how many of a sequence's first tokens need not show theirs; None: no drafter reads them
        self._watched: Callable[[list[int]], int] | None = None

    def __reduce__(self) -> Any:
        raise RefusedError(
            "a model on the native decoder is not copied or pickled; load it once more, also in "
            "another process: both map the same weights"
        )

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    @property
    def long(self) -> list[bool]:
        return [row.long for row in self.rows]

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        states = 4 * self.passes.facts["row_numbers"] * len(lengths)
        return self.pool.bytes * sum(-(-n // PAGE) for n in lengths) + states

    def reserve(self, total: int) -> None:
        self.pool.capacity = total // self.pool.bytes

    def show(self, known: Callable[[list[int]], int] | None) -> None:
        self._watched = known if self.taps else None

    def shown(self) -> list[Known | None]:
        return self._seen.take()

    def remember(self, on: bool) -> None:
        if (cached := self.pool.cached) is not None:
            cached.clear()
        pages = PrefixCache(None, divisible=True, release=lambda row: row.release())
        self.pool.cached = pages if on else None
        stores = on and self.passes.states is not None
        self.stored = PrefixCache(MOST_STORED, divisible=False) if stores else None

    def salted(self, salt: str) -> None:
        self.salt = salt

    def known(self, prompt: list[int]) -> int:
        length, _ = self._found(prompt)
        return self._resumed(prompt, length)[0]

    @property
    def _shared_by(self) -> Hashable:
        """Return the key of rows that share pages: their salt, and the way they are read in."""
        return (self.salt, "long") if self._beyond else self.salt

    def _resumed(self, prompt: list[int], length: int) -> tuple[int, Any]:
        """Return behind how many of the `length` first tokens of a prompt, which another row
        shares, a row can go on, and copies of the recurrent states there."""
        if self.passes.states is None:
            return length, None
        if self.stored is None:
            return 0, None
        return self.stored.find(self._shared_by, prompt[:length])

    def _store(self, b: int) -> None:
        """Store row b's recurrent states for others that begin with all of its tokens."""
        layout, row = self.passes.states, self.rows[b]
        if layout is None or self.stored is None or row.states is None or row.length < LEAST:
            return
        self.passes.settle(row.states, row.length)
        copies = layout.copied(row.states, row.length)
        self.stored.add(self.salts[b], self.texts[b][: row.length], copies)

    def _found(self, prompt: list[int]) -> tuple[int, PagedRow | None]:
        """Return how many first tokens of a prompt another row shares, whose states need not be
        shown, and that row."""
        length, row = self._common(prompt)
        if length < LEAST:
            return 0, None
        return length if self._watched is None else min(length, self._watched(prompt)), row

    def _common(self, prompt: list[int]) -> tuple[int, PagedRow | None]:
        """Return how many first tokens of a prompt another row shares, and that row."""
        if self.pool.cached is None:
            return 0, None
        salt = self._shared_by
        length, row = self.pool.cached.find(salt, prompt)
        for own, text, other in zip(self.salts, self.texts, self.rows, strict=True):
            if own == salt and text[:LEAST] == prompt[:LEAST]:
                same = min(shared(text, prompt), other.length)
                length, row = (same, other) if same > length else (length, row)
        return length, row

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        limits = self.limits([self._beyond] * len(prompts))
        check_room([0] * len(prompts), [len(p) for p in prompts], limits)
        first = len(self.rows)
        # at once, for a Ctrl-C in between
        self.rows, self.texts, self.salts, self._seen = (
            [*self.rows, *self._fresh(len(prompts))],
            [*self.texts, *([] for _ in prompts)],
            [*self.salts, *(self._shared_by for _ in prompts)],
            self._seen.with_rows(len(prompts)),
        )
        self.recalled = []
        unread: dict[int, list[int]] = {}
        for b, prompt in enumerate(prompts, first):
            head = prompt[:LEAST]
            if self.pool.cached is not None and any(
                head == prompts[other - first][:LEAST] for other in unread
            ):  # it may share what these are about to read
                self._read(unread)
                unread = {}
            length, row = self._found(prompt)
            length, states = self._resumed(prompt, length)
            if length and row is not None:
                own, fresh = self.rows[b].states, row.fork(length)
                if own is not None and self.passes.states is not None:
                    self.passes.states.put(own, length, states)
                fresh.states, fresh.following = own, own is not None
                self.rows[b], self.texts[b] = fresh, prompt[:length]
            self.recalled.append(length)
            unread[b] = prompt[length:]
        self._read(unread)

    def _fresh(self, count: int) -> list[PagedRow]:
        """Return so many rows that hold nothing yet."""
        rows = [PagedRow(self.pool, long=self._beyond) for _ in range(count)]
        if self.passes.states is not None:
            for row in rows:
                row.states = RecurrentStates.fresh(self.passes.states)
                row.following = True
        return rows

    def _read(self, unread: dict[int, list[int]]) -> None:
        every = range(len(self.rows))
        self.score([unread.get(b, []) for b in every], [0 for _ in every])

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past = self.lengths
        for b, row in enumerate(self.rows):
            if row.states is not None:  # a companion may have moved them
                row.states.check_back(b, past[b], past[b])
        check_room(past, [len(block) for block in blocks], self.limits(self.long))
        if self.stored is not None:
            blocks = self._read_up_to_forks(blocks, need)
        return self._appended(blocks, need)

    def _read_up_to_forks(self, blocks: list[list[int]], need: list[int]) -> list[list[int]]:
        """Read prompts up to where they leave other sequences, and store the recurrent states
        there. Return the rest of all blocks."""
        before: list[list[int]] = [[] for _ in blocks]
        for b, (row, block) in enumerate(zip(self.rows, blocks, strict=True)):
            if not row.following or not block:
                continue
            new, _ = self._common([*self.texts[b], *block])
            new -= row.length
            row.following = new >= len(block) and not need[b]
            if 0 < new <= len(block) - max(1, need[b]) and new + row.length >= LEAST:
                before[b] = block[:new]
        if not any(before):
            return blocks
        self._appended(before, [0 for _ in blocks])
        for b, block in enumerate(before):
            if block:
                self._store(b)
        return [block[len(one) :] for block, one in zip(blocks, before, strict=True)]

    def _appended(self, blocks: list[list[int]], need: list[int]) -> Tensor:
        """Return logits as `score` does, of blocks that there is room for."""
        past = self.lengths
        logits = self.scored(self.passes, past, blocks, need)
        # last, so that a row is as it was where memory does not suffice
        for row, text, start, block in zip(self.rows, self.texts, past, blocks, strict=True):
            text[start:] = block
            row.length = start + len(block)
        return logits

    def scored(
        self, passes: NativePasses, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """Return logits as `score` does, by any network over these pages, where row b has past[b]
        tokens in place; no row moves on."""
        B, most, own = len(blocks), max(need, default=0), passes is self.passes
        parts = [
            RowPart(self.rows[b], past[b], block, need[b], b * most)
            for b, block in enumerate(blocks)
            if block
        ]
        made = passes.run(parts, B, most, shows=own and self._watched is not None)
        if min(need, default=0) < most:
            for b, count in enumerate(need):
                made.logits[b, count:] = made.hidden[b, count:] = 0
        if own:
            self._hidden = made.hidden
            if made.shown is not None:
                counts = [len(block) for block in blocks]
                self._seen.add(past, [made.shown] if B == 1 else list(made.shown.split(counts)))
        return made.logits

    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        past, limits = self.lengths, self.limits(self.long)
        made, lengths = self.chained(self.passes, past, limits, blocks, budget, choice, embeddings)
        tokens: list[list[int]] = made.tokens.tolist()
        for b, (row, text) in enumerate(zip(self.rows, self.texts, strict=True)):
            text[past[b] :] = [*blocks[b], *tokens[b]][: lengths[b] - past[b]]
            row.length = lengths[b]
        return made

    def chained(
        self,
        passes: NativePasses,
        past: list[int],
        limits: int | None | list[int | None],
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> tuple[ChainedTokens, list[int]]:
        """Make a draft's tokens as `chain` does, by any network over these pages, where row b has
        past[b] tokens in place; no row moves on. Returns how many each has in place behind it, too:
        the last token is not read. limits: tokens that rows may have, as `check_room` takes them.
        """
        counts = [len(block) + max(0, g - 1) for block, g in zip(blocks, budget, strict=True)]
        check_room(past, counts, limits)
        lengths = [n + count for n, count in zip(past, counts, strict=True)]
        passes.turn_up_to(max(lengths))
        for row, start, block, length in zip(self.rows, past, blocks, lengths, strict=True):
            if block:
                row.reserve(start, length)
        ends = [start + len(block) for start, block in zip(past, blocks, strict=True)]
        apart = [passes.apart(row) for row in self.rows]
        chain = DraftChain(budget, ends, apart, self.rows, self.vocab_size, choice, embeddings)
        every = enumerate(zip(self.rows, past, blocks, budget, strict=True))
        parts = [RowPart(row, start, x, int(g > 0), b) for b, (row, start, x, g) in every if x]
        passes.run(parts, len(blocks), 1, shows=False, chain=chain)
        return chain.made, lengths

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        layout = self.passes.states
        for b, (row, length) in enumerate(zip(self.rows, lengths, strict=True)):
            if row.states is not None:
                row.states.check_back(b, row.length, length)
        for row, length in zip(self.rows, lengths, strict=True):
            if not length:  # it begins anew
                row.shift = 0
                row.states = layout and RecurrentStates.fresh(layout)
        for row, text, length in zip(self.rows, self.texts, lengths, strict=True):
            row.length = length
            del text[length:]
        self._seen.cut(lengths)

    def permute(self, rows: list[int]) -> None:
        used: set[int] = set()
        new: list[PagedRow] = []
        for b in rows:
            row = self.rows[b]
            if b in used:
                states = row.states and row.states.copy()
                row = row.fork(row.length)
                row.states = states
            new.append(row)
            used.add(b)
        texts, salts = [list(self.texts[b]) for b in rows], [self.salts[b] for b in rows]
        left = [row for b, row in enumerate(self.rows) if b not in used]
        # at once, as above
        self.rows, self.texts, self.salts, self._seen = new, texts, salts, self._seen.selected(rows)
        for row in left:
            row.release()
        if not rows:
            self.pool.recount()

    def leave(self, rows: list[int]) -> None:
        for b in rows:
            if self.pool.cached is not None and b < len(self.rows):
                row, text = self.rows[b], self.texts[b]
                length = min(len(text), row.length)  # a Ctrl-C may have come between
                if length >= LEAST and not isinstance(self.salts[b], Unshared):
                    if length == row.length:
                        self._store(b)
                    self.pool.cached.add(self.salts[b], text[:length], row.fork(length))
        self.permute(staying(len(self.rows), rows))


class NativeCompanion(Model):
    """A smaller copy of a model over the rows of `target`, which have joined and read before they
    join here: the model drafts for itself.

    It reads the keys and values that the target has made of the text, and writes those of draft
    tokens behind them, where the target's next pass writes its own. So there is nothing to read
    first, nothing to catch up with, and no second cache. The target never reads what a draft token
    has left there: its rows end before it, and its passes write before they read.
    """

    capabilities = Capabilities(target_rows=True, memory=True, chain=True)
    reads_target = True

    def __init__(self, target: NativeModel, passes: NativePasses, facts: dict[str, Any]) -> None:
        self.target, self.passes, self.runtime = target, passes, target.runtime
        self.encoder_decoder, self.vocab_size = target.encoder_decoder, target.vocab_size
        self.context, self.source_context = target.longest, target.source_context
        self.source_vocab_size = target.source_vocab_size
        self.computed: str = facts["computed"]
        identity = facts.get("identity")
        self.identity = identity and f"{identity} over the target's rows"
        self.rewind = target.rewind
        self._own: list[int] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row in place: what the target has read, and draft tokens behind it."""
        return [max(own, read) for own, read in zip(self._own, self.target.lengths, strict=True)]

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self._own += [0] * len(prompts)

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past = self.lengths
        check_room(past, [len(block) for block in blocks], self.context)
        self._own = [n + len(block) for n, block in zip(past, blocks, strict=True)]
        return self.target.scored(self.passes, past, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self._own = list(lengths)

    def permute(self, rows: list[int]) -> None:
        self._own = [self._own[b] for b in rows]

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self._own), rows))  # those of the target may have left

    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        made, self._own = self.target.chained(
            self.passes, self.lengths, self.context, blocks, budget, choice, embeddings
        )
        return made


class NativePairs(NativeModel, PairModel):
    """A decoder of pairs, whose blocks are the tokens of pairs: `give` first what it reads of
    them."""

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        super().__init__(passes, facts)
        self._rests: list[WeightRecord] = []
        self._join = weight_record(passes.facts["join"], passes.memory, self._rests)
        self._instructions = chosen_set().encode()

    def joined(self, states: Tensor) -> Tensor:
        """Return a target's states, `[N, W]`, as the decoder reads them, `[N, H]`."""
        states = states.float().contiguous()
        made = torch.empty(len(states), self._join.outputs)
        pointers = states.data_ptr(), len(states), made.data_ptr()
        if not library().foretoken_product(self._instructions, self._join, *pointers):
            raise MemoryError("no memory for the states of a target")
        return made[:, : self.passes.width]

    def pair(self, tokens: list[int], states: Tensor, embeddings: Tensor) -> None:
        """Let the next `chain` read these tokens' embeddings, and with each a target's states,
        `[N, W]`."""
        n, E, H = len(tokens), embeddings.shape[1], self.passes.width
        own = states.float().contiguous()
        given, joined = torch.empty(n, E + H), torch.empty(n, self._join.outputs)
        record = PairsRecord(n, E, H, KINDS[embeddings.dtype], pointer(self._join))
        ids = np.array(tokens, np.int64)
        record.ids, record.embeddings = ids.ctypes.data, embeddings.data_ptr()
        record.states, record.joined = own.data_ptr(), joined.data_ptr()
        record.given = given.data_ptr()
        if not library().foretoken_join(self._instructions, record):
            raise MemoryError("no memory for the states of a target")
        self.passes.given = given

    def give(self, pairs: Tensor, counts: list[int]) -> None:
        """Let the next `score` read these, `[sum(counts), E + H]`: embeddings, then states."""
        self.passes.given = pairs.float().contiguous()
