"""A decoder on the native kernels, as a Model.

A row is pages and a length; rollback is a smaller length, a fork or a shared prefix the same pages.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Any

import torch
from torch import Tensor

from foretoken.models.base import Blocks
from foretoken.models.native.pages import PAGE, PagedRow, PagePool
from foretoken.models.native.passes import NativePasses, RowPart
from foretoken.models.prefixes import shared
from foretoken.models.rows import CHUNK, check_lengths, check_room, staying
from foretoken.models.shown import Known, Shown

LEAST = 32  # tokens that sequences must share
MOST_KEPT = 2**29  # bytes of pages that are cached of rows that have left


class CachedPrefixes:
    """Rows that have left, the latest last; the oldest give way."""

    def __init__(self) -> None:
        self.rows: list[tuple[Hashable, list[int], PagedRow]] = []

    def add(self, salt: Hashable, tokens: list[int], row: PagedRow) -> None:
        """Cache a row in place of those that it begins with."""
        left = list(self.rows)
        for entry in left:
            if entry[0] == salt and shared(entry[1], tokens) == len(entry[1]):
                self._drop(entry)
        self.rows.append((salt, tokens, row))
        while sum(len(each.pages) * each.pool.bytes for _, _, each in self.rows) > MOST_KEPT:
            self._drop(self.rows[0])

    def clear(self) -> None:
        """Give up all of them."""
        for entry in list(self.rows):
            self._drop(entry)

    def _drop(self, entry: tuple[Hashable, list[int], PagedRow]) -> None:
        self.rows.remove(entry)
        entry[2].release()


class NativeModel:
    """Model protocol over `passes`."""

    encoder_decoder = False
    source_context: int | None = None
    source_vocab_size: int | None = None
    runtime = "native"
    takes_tensors = False
    device = torch.device("cpu")
    padding = 0
    batch_invariant = True  # by its arithmetic

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        self.passes = passes
        self.vocab_size = passes.vocab_size
        self.context: int | None = facts["context"]
        self.identity: str | None = facts.get("identity")  # what its speed follows from
        self.computed: str = facts.get("computed", "float32")
        self.pool = PagePool(passes.starts[-1], "float16" if passes.facts["halved"] else "float32")
        self.rows: list[PagedRow] = []
        self.texts: list[list[int]] = []  # whose keys and values are there
        self.salts: list[Hashable] = []
        self.salt = ""  # of the rows that join next
        self.cached: CachedPrefixes | None = None
        self.recalled: list[int] = []  # tokens of the rows that joined last
        self.taps = passes.taps
        self._seen = Shown()  # states there, until they are taken
        # how many of a sequence's first tokens need not show theirs; None: no drafter reads them
        self._watched: Callable[[list[int]], int] | None = None
        self._hidden = torch.zeros(0, 0, passes.width)

    @property
    def hidden(self) -> Tensor:
        return self._hidden

    @property
    def lengths(self) -> list[int]:
        return [row.length for row in self.rows]

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        return self.pool.bytes * sum(-(-n // PAGE) for n in lengths)

    def show(self, known: Callable[[list[int]], int] | None) -> None:
        self._watched = known if self.taps else None

    def shown(self) -> list[Known | None]:
        return self._seen.take()

    def remember(self, on: bool) -> None:
        if self.cached is not None:
            self.cached.clear()
        self.cached = CachedPrefixes() if on else None

    def salted(self, salt: str) -> None:
        self.salt = salt

    def known(self, prompt: list[int]) -> int:
        return self._found(prompt)[0]

    def _found(self, prompt: list[int]) -> tuple[int, PagedRow | None]:
        """Return how many first tokens of a prompt another row shares, whose states need not be
        shown, and that row."""
        if self.cached is None:
            return 0, None
        best, row = 0, None
        running = zip(self.salts, self.texts, self.rows, strict=True)
        for salt, text, other in [*self.cached.rows, *running]:
            same = shared(text[: other.length], prompt) if salt == self.salt else 0
            if same > max(best, LEAST - 1):
                best, row = same, other
        if self._watched is not None:
            best = min(best, self._watched(prompt))
        return best, row

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        check_room([0] * len(prompts), [len(p) for p in prompts], self.context)
        first = len(self.rows)
        # at once, for a Ctrl-C in between
        self.rows, self.texts, self.salts, self._seen = (
            [*self.rows, *(PagedRow(self.pool) for _ in prompts)],
            [*self.texts, *([] for _ in prompts)],
            [*self.salts, *(self.salt for _ in prompts)],
            self._seen.with_rows(len(prompts)),
        )
        self.recalled = []
        for b, prompt in enumerate(prompts, first):
            length, row = self._found(prompt)
            if length and row is not None:
                self.rows[b] = row.fork(length)
                self.texts[b] = prompt[:length]
            self.recalled.append(length)
            for at in range(length, len(prompt), CHUNK):
                block = prompt[at : at + CHUNK]
                every = range(len(self.rows))
                self.score([block if i == b else [] for i in every], [0 for _ in every])

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past = self.lengths
        check_room(past, [len(block) for block in blocks], self.context)
        for row, block in zip(self.rows, blocks, strict=True):
            row.length += len(block)
        logits = self.scored(self.passes, past, blocks, need)
        for text, start, block in zip(self.texts, past, blocks, strict=True):
            text[start:] = block
        return logits

    def scored(
        self, passes: NativePasses, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """Return logits as `score` does, by any network over these pages, where row b has past[b]
        tokens in place; no row moves on."""
        B, most = len(blocks), max(need, default=0)
        full = all(count == most for count in need)
        parts = [
            RowPart(self.rows[b], past[b], block, need[b], b * most)
            for b, block in enumerate(blocks)
            if block
        ]
        if not parts:
            if passes is self.passes:
                self._hidden = torch.zeros(B, most, passes.width)
            return torch.zeros(B, most, self.vocab_size)
        made = passes.run(parts, B * most, zeroed=not full)
        if passes is self.passes:
            self._hidden = made.hidden.view(B, most, passes.width)
            if made.shown is not None and self._watched is not None:
                counts = [len(block) for block in blocks]
                self._seen.add(past, list(made.shown.split(counts)))
        return made.logits.unflatten(0, (B, most)) if most else torch.zeros(B, 0, self.vocab_size)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        for row, text, length in zip(self.rows, self.texts, lengths, strict=True):
            row.length = length
            del text[length:]
        self._seen.cut(lengths)

    def permute(self, rows: list[int]) -> None:
        used: set[int] = set()
        new: list[PagedRow] = []
        for b in rows:
            new.append(self.rows[b].fork(self.rows[b].length) if b in used else self.rows[b])
            used.add(b)
        texts, salts = [list(self.texts[b]) for b in rows], [self.salts[b] for b in rows]
        left = [row for b, row in enumerate(self.rows) if b not in used]
        # at once, as above
        self.rows, self.texts, self.salts, self._seen = new, texts, salts, self._seen.selected(rows)
        for row in left:
            row.release()

    def leave(self, rows: list[int]) -> None:
        for b in rows:
            if self.cached is not None and b < len(self.rows) and self.texts[b]:
                row = self.rows[b]
                self.cached.add(self.salts[b], list(self.texts[b]), row.fork(row.length))
        self.permute(staying(len(self.rows), rows))
