"""A decoder on ONNX Runtime, behind the Model protocol.

A row is a place in the slots and a length; rollback is a smaller length. Rows with few new tokens
share a pass; one that reads a long block, such as a prompt, has a pass of its own, as the padded
block of a common one would be as wide for all.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.models.base import Blocks
from foretoken.models.onnx.passes import Part, Passes, attending
from foretoken.models.onnx.slots import KeySlots, Shape, valid
from foretoken.models.prefixes import PrefixCache, shared
from foretoken.models.rows import (
    CHUNK,
    by_place,
    check_lengths,
    check_room,
    joined,
    most_slots,
    repeated,
    room,
    staying,
)
from foretoken.models.shown import Known, Shown

WIDTHS = (1, 2, 3, 5, 8, 17)  # of the passes that are compared
WIDE = 32  # tokens of a row from which on it has a pass of its own
CACHED_BYTES = 2**29  # of keys and values of texts that have left, at most
LEAST = 32  # tokens that texts must share


class OnnxModel:
    """Model protocol over `passes`; `facts` are the export's."""

    encoder_decoder = False
    source_context: int | None = None
    source_vocab_size: int | None = None
    runtime = "onnx"
    takes_tensors = False
    device = torch.device("cpu")
    padding = 0

    def __init__(self, passes: Passes, facts: dict[str, Any]) -> None:
        self.passes = passes
        self.vocab_size: int = facts["vocab_size"]
        self.context: int | None = facts["context"]
        self.identity: str | None = facts.get("identity")  # what its speed follows from
        self.computed: str = facts.get("computed", "float32")
        self.shapes: list[Shape] = [(heads, width) for heads, width in facts["keys"]]
        self.slots = KeySlots(self.shapes)
        self.texts: list[list[int]] = []  # whose keys and values are there
        self.salts: list[Hashable] = []
        self.salt = ""  # of the rows that join next
        self.kept: PrefixCache | None = None
        self.recalled: list[int] = []  # tokens of the rows that joined last
        self.taps = tuple(facts.get("taps", ()))
        self._seen = Shown()  # states there, until they are taken
        # how many of a text's first tokens need not show theirs; None: nobody reads them
        self._watched: Callable[[list[int]], int] | None = None
        self._hidden = torch.zeros(0, 0, passes.width)
        self._given: list[Tensor] = []  # by row, what a decoder of pairs reads in the next pass

    @property
    def hidden(self) -> Tensor:
        return self._hidden

    @property
    def lengths(self) -> list[int]:
        return self.slots.lengths

    @cached_property
    def batch_invariant(self) -> bool:
        return is_invariant(self.passes, self.shapes)

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        return self.slots.token_bytes * most_slots(lengths, self.slots.unit)

    def joined(self, states: Tensor) -> Tensor:
        """States of a target, `[N, W]`, as a decoder of pairs reads them, `[N, H]`."""
        if self.passes.join is None:
            return states
        (made,) = self.passes.join.run(None, {"states": states.contiguous().numpy()})
        return torch.from_numpy(made)

    def give(self, pairs: Tensor, counts: list[int]) -> None:
        """The next pass reads these in place of ids, row behind row: `[sum(counts), W]`."""
        self._given = list(pairs.split(counts))

    def show(self, known: Callable[[list[int]], int] | None) -> None:
        self._watched = known if self.taps else None

    def shown(self) -> list[Known | None]:
        return self._seen.take()

    def remember(self, on: bool) -> None:
        self.kept = PrefixCache(CACHED_BYTES, divisible=True) if on else None

    def salted(self, salt: str) -> None:
        self.salt = salt

    def known(self, prompt: list[int]) -> int:
        return self._found(prompt)[0]

    def _found(self, prompt: list[int]) -> tuple[int, list[Any]]:
        """The first tokens of a prompt that another text shares and need not show their states, and
        their keys and values."""
        if self.kept is None:
            return 0, []
        length, arrays = self.kept.find(self.salt, prompt)
        for b, (text, salt) in enumerate(zip(self.texts, self.salts, strict=True)):
            same = shared(text[: self.lengths[b]], prompt) if salt == self.salt else 0
            row = self.slots.row(self.slots.places[b], same)
            if same > length and valid(row):
                length, arrays = same, row
        if length < LEAST:
            return 0, []
        if self._watched is not None:
            length = min(length, self._watched(prompt))
        return length, [x[:, :length] for x in arrays]

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        check_room([0] * len(prompts), [len(p) for p in prompts], self.context)
        first, slots = len(self.lengths), self.slots
        places = joined(slots.places, len(prompts))
        slots.reserve(room(places), 0)
        # at once, for a Ctrl-C in between
        slots.places, slots.lengths, self.texts, self.salts, self._seen = (
            places,
            [*slots.lengths, *(0 for _ in prompts)],
            [*self.texts, *([] for _ in prompts)],
            [*self.salts, *(self.salt for _ in prompts)],
            self._seen.with_rows(len(prompts)),
        )
        self.recalled = []
        for b, prompt in enumerate(prompts, first):
            length, arrays = self._found(prompt)
            if length:
                self.slots.reserve(0, length)
                self.slots.put(self.slots.places[b], arrays)
                self.texts[b], self.lengths[b] = prompt[:length], length
            self.recalled.append(length)
            for at in range(length, len(prompt), CHUNK):
                block = prompt[at : at + CHUNK]
                every = range(len(self.lengths))
                self.score([block if i == b else [] for i in every], [0 for _ in every])

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past = list(self.lengths)
        check_room(past, [len(block) for block in blocks], self.context)
        self.slots.lengths = [n + len(block) for n, block in zip(past, blocks, strict=True)]
        logits = self.scored(self.passes, past, blocks, need)
        for text, start, block in zip(self.texts, past, blocks, strict=True):
            text[start:] = block
        return logits

    def scored(
        self, passes: Passes, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """The logits as `score` returns them, by any graph over these slots, of which row b has
        past[b] tokens in place; no row moves on."""
        slots, most = self.slots, max(need, default=0)
        # a pass's padded block begins behind the last token of each of its rows
        widths = [attending(len(block)) for block in blocks]
        shared = max((width for width in widths if width < WIDE), default=0)
        ends = [n + max(width, shared) for n, width in zip(past, widths, strict=True)]
        slots.reserve(len(blocks), max(ends, default=0))
        slots.close(past)
        logits = hidden = None
        states: dict[int, Tensor] = {}
        for rows in self._shared(blocks):
            parts = [Part(slots.places[b], past[b], blocks[b], need[b]) for b in rows]
            given = torch.cat([self._given[b] for b in rows]).numpy() if self._given else None
            bound = passes.run(slots, parts, given)
            if len(rows) == len(blocks) == 1:
                logits, hidden = bound.logits, bound.hidden
                if most < logits.shape[1]:
                    logits, hidden = logits[:, :most], hidden[:, :most]
            elif most:
                if logits is None or hidden is None:
                    logits = torch.zeros(len(blocks), most, self.vocab_size)
                    hidden = torch.zeros(len(blocks), most, passes.width)
                _laid_out(logits, bound.logits[0], rows, need)
                _laid_out(hidden, bound.hidden[0], rows, need)
            if passes is self.passes and self._watched is not None:
                counts = [len(blocks[b]) for b in rows]
                seen = torch.from_numpy(bound.arrays["shown"][: sum(counts)].copy())
                states |= dict(zip(rows, seen.split(counts), strict=True))
        if passes is self.passes:
            self._hidden = torch.zeros(len(blocks), 0, passes.width) if hidden is None else hidden
            if states:
                nothing = torch.zeros(0, passes.shown)
                self._seen.add(past, [states.get(b, nothing) for b in range(len(blocks))])
        return torch.zeros(len(blocks), 0, self.vocab_size) if logits is None else logits

    def _shared(self, blocks: list[list[int]]) -> list[list[int]]:
        """The rows of each pass, by their places."""
        order = [b for b in by_place(self.slots.places) if blocks[b]]
        short = [b for b in order if len(blocks[b]) < WIDE]
        return [*([b] for b in order if len(blocks[b]) >= WIDE), *([short] if short else [])]

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self.slots.lengths = list(lengths)
        self._seen.cut(lengths)
        for text, length in zip(self.texts, lengths, strict=True):
            del text[length:]

    def permute(self, rows: list[int]) -> None:
        slots, places = self.slots, [self.slots.places[b] for b in rows]
        lengths = [slots.lengths[b] for b in rows]
        places = slots.copied(places, lengths, repeated(places))
        texts, salts = [list(self.texts[b]) for b in rows], [self.salts[b] for b in rows]
        # at once, as above
        slots.places, slots.lengths, self.texts, self.salts, self._seen = (
            places,
            lengths,
            texts,
            salts,
            self._seen.selected(rows),
        )

    def leave(self, rows: list[int]) -> None:
        for b in rows:
            if self.kept is not None and b < len(self.texts):  # some may not have joined
                length = self.lengths[b]
                arrays = self.slots.row(self.slots.places[b], length)
                if valid(arrays):
                    text = self.texts[b][:length]
                    self.kept.add(self.salts[b], text, [x.copy() for x in arrays])
        self.permute(staying(len(self.lengths), rows))


def _laid_out(whole: Tensor, flat: Tensor, rows: list[int], need: list[int]) -> None:
    """Put a pass's numbers, row behind row, where these rows have theirs."""
    counts = [need[b] for b in rows]
    for b, part in zip(rows, flat[: sum(counts)].split(counts), strict=True):
        whole[b, : need[b]] = part


def is_invariant(passes: Passes, shapes: list[Shape]) -> bool:
    """Tell whether the logits of a token are the same to the bit in passes of several sizes, with
    its real weights: which products ONNX Runtime has, and how they sum, is the processor's."""
    slots, tokens = KeySlots(shapes), [1 + i % 7 for i in range(2 * max(WIDTHS))]
    slots.reserve(1, len(tokens) + 1)
    together = passes.run(slots, [Part(0, 0, tokens, len(tokens))]).arrays["logits"].copy()
    for width in WIDTHS:
        for at in (0, width):
            block = tokens[at : at + width]
            made = passes.run(slots, [Part(0, at, block, width)]).arrays["logits"]
            if not np.array_equal(made[:width], together[at : at + width]):
                return False
    return True
