"""Rows of models on every runtime: their places in arrays, how far a pass is padded, checks of
lengths and sources, and blocks as one tensor.

Imports no transformers, which takes seconds.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.errors import InputError
from foretoken.transfer import sent

if TYPE_CHECKING:
    from foretoken.models.base import Blocks


def moved(places: list[int], rows: list[int]) -> list[int]:
    """The places of all rows, where these `rows` have taken the first ones that are free."""
    used, new = set(places), list(places)
    free = (place for place in itertools.count() if place not in used)
    for b in rows:
        new[b] = next(free)
    return new


def joined(places: list[int], rows: int) -> list[int]:
    """Places of so many more rows, the first ones that are free."""
    return moved(places + [-1] * rows, list(range(len(places), len(places) + rows)))


def repeated(places: list[int]) -> list[int]:
    """The rows whose place a row before them has."""
    return [b for b, place in enumerate(places) if place in places[:b]]


def beyond(places: list[int]) -> list[int]:
    """The rows that are not in the first places, of which there are as many as rows."""
    return [b for b, place in enumerate(places) if place >= len(places)]


def by_place(places: list[int]) -> list[int]:
    """The rows in the order of their places."""
    return sorted(range(len(places)), key=places.__getitem__)


def room(places: list[int]) -> int:
    """Return how many rows must fit, for these to have their places."""
    return 1 + max(places, default=-1)


def most_slots(lengths: list[int], unit: int) -> int:
    """Return how many slots rows of these lengths take at most, in arrays that are never twice as
    long as the longest and rounded up to a multiple of `unit`."""
    return len(lengths) * 2 * (max(lengths, default=0) + unit)


def roomy(rows: int) -> int:
    """So many, and half as many that may join them."""
    return rows + rows // 2


class Places:
    """Rows of their own lengths in arrays: each has a place, of which slots 0 .. length-1 are its
    own. One that leaves leaves a gap, for the next that joins or, before a pass, for the last: the
    others stay where they are."""

    unit = 64  # slots; a capacity that is chosen here is a multiple of this
    spare = 2  # part of the slots that are added beside those that are needed
    lengths: list[int]
    places: list[int]
    rows: int  # for which there is room
    capacity: int  # slots

    def parts(self) -> list[Any]:
        """The arrays: each has those of all `arrays`, and can `fit`, `put` and give a `row`, once
        it `is_initialized`."""
        raise NotImplementedError

    def reserve(self, rows: int, slots: int) -> None:
        """Room for so many, and for some more where there was too little."""
        if rows <= self.rows and slots <= self.capacity:
            return
        # of many that have left, some room
        rows = max(rows, roomy(self.rows)) if rows > self.rows else min(self.rows, roomy(rows))
        if slots > self.capacity:
            slots = self._whole(max(slots, self.capacity + self.capacity // self.spare))
        self.grow(rows, max(slots, self.capacity))

    def trim(self, rows: int, slots: int) -> None:
        """Give up slots where these are less than half."""
        if 2 * slots + self.unit < self.capacity:
            self.grow(min(self.rows, roomy(rows)), self._whole(slots))

    def grow(self, rows: int, capacity: int) -> None:
        """Make new arrays, with the rows in their places."""
        for part in self.filled():
            part.fit(part.arrays, rows, capacity, room(self.places))
        self.rows, self.capacity = rows, capacity

    def join(self, other: Any) -> None:
        """The rows of `other`, which is fresh, join behind these."""
        B, places = len(self.places), joined(self.places, len(other.places))
        self.reserve(room(places), max(other.lengths, default=0))
        for own, theirs in zip(self.parts(), other.parts(), strict=True):
            if theirs.is_initialized and not own.is_initialized:
                own.fit(theirs.arrays, self.rows, self.capacity, room(self.places))
            for b, n in enumerate(other.lengths if own.is_initialized else []):
                own.put(places[B + b], theirs.row(other.places[b], n) if n else own.row(0, 0))
        self.places, self.lengths = places, self.lengths + other.lengths

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was. Only what is repeated is copied."""
        places, lengths = [self.places[b] for b in rows], [self.lengths[b] for b in rows]
        self.places, self.lengths = self.copied(places, lengths, repeated(places)), lengths

    def close(self, lengths: list[int] | None = None) -> None:
        """The last rows move into the gaps, with these `lengths` if they are not their own: a pass
        takes the first places."""
        rows = beyond(self.places)
        if rows:
            lengths = self.lengths if lengths is None else lengths
            self.places = self.copied(self.places, lengths, rows)

    def copied(self, places: list[int], lengths: list[int], rows: list[int]) -> list[int]:
        """The places, where these `rows` have been copied to free ones."""
        new = moved(places, rows)
        self.reserve(room(new), 0)
        for part in self.filled():
            for b in rows:
                part.put(new[b], part.row(places[b], lengths[b]))
        return new

    def filled(self) -> list[Any]:
        return [part for part in self.parts() if part.is_initialized]

    def _whole(self, slots: int) -> int:
        return -(-max(slots, 1) // self.unit) * self.unit


CHUNK = 512  # tokens of a prompt in one run: bounds the memory of a prefill
BEYOND = 2**24  # added to positions in a long row of a model that `Switches`


def staying(rows: int, leaving: list[int]) -> list[int]:
    """Return those of so many rows that do not leave."""
    places = set(leaving)
    return [b for b in range(rows) if b not in places]


def check_lengths(old: list[int], new: list[int]) -> None:
    if len(old) != len(new) or any(not 0 <= n <= o for o, n in zip(old, new, strict=True)):
        raise InputError(f"lengths {new} of rows that hold {old} tokens; a row can only go back")


def check_room(
    lengths: list[int], counts: list[int], context: int | None | list[int | None]
) -> None:
    """Raise InputError for a row that would hold more than `context` tokens, which may be each
    row's own; None: no limit."""
    if len(lengths) != len(counts):
        raise InputError(f"{len(counts)} blocks for {len(lengths)} rows: give one per row")
    if context is None:
        return
    limits = context if isinstance(context, list) else [context] * len(lengths)
    for b, (n, count, limit) in enumerate(zip(lengths, counts, limits, strict=True)):
        if limit is not None and n + count > limit and count:
            raise InputError(
                f"row {b} would hold {n + count} tokens, the model {limit}: shorten it"
            )


def padded(blocks: Blocks, device: torch.device) -> Tensor:
    """Blocks as ids `[B, width]`, padded on the right with id 0, to which no real token attends."""
    if isinstance(blocks, Tensor):
        return blocks
    width = max(map(len, blocks), default=0)
    rows = [b + [0] * (width - len(b)) for b in blocks]
    return sent(torch.tensor(rows, dtype=torch.long), device)


def check_sources(
    prompts: list[list[int]], sources: list[list[int]] | None, context: int | None
) -> None:
    if sources is None or len(sources) != len(prompts) or not all(sources):
        raise InputError("an encoder-decoder model needs one non-empty source for each prompt")
    longest = max(map(len, sources))
    if context is not None and longest > context:
        raise InputError(f"a source of {longest} tokens, the encoder takes {context}: shorten it")
