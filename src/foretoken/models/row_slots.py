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
from foretoken.transfer import send

if TYPE_CHECKING:
    from foretoken.models.base import Blocks


def reassign_slots(slots: list[int], rows: list[int]) -> list[int]:
    """The places of all rows, where these `rows` have taken the first ones that are free."""
    used, new = set(slots), list(slots)
    free = (place for place in itertools.count() if place not in used)
    for b in rows:
        new[b] = next(free)
    return new


def allocate_slots(slots: list[int], num_rows: int) -> list[int]:
    """Places of so many more rows, the first ones that are free."""
    return reassign_slots(slots + [-1] * num_rows, list(range(len(slots), len(slots) + num_rows)))


def find_repeated_rows(slots: list[int]) -> list[int]:
    """The rows whose place a row before them has."""
    return [b for b, place in enumerate(slots) if place in slots[:b]]


def find_rows_to_compact(slots: list[int]) -> list[int]:
    """The rows that are not in the first places, of which there are as many as rows."""
    return [b for b, place in enumerate(slots) if place >= len(slots)]


def order_by_slot(slots: list[int]) -> list[int]:
    """The rows in the order of their places."""
    return sorted(range(len(slots)), key=slots.__getitem__)


def count_needed_slots(slots: list[int]) -> int:
    """Return how many rows must fit, for these to have their places."""
    return 1 + max(slots, default=-1)


def compute_max_positions(lengths: list[int], unit: int) -> int:
    """Return how many slots rows of these lengths take at most, in arrays that are never twice as
    long as the longest and rounded up to a multiple of `unit`."""
    return len(lengths) * 2 * (max(lengths, default=0) + unit)


def add_spare_rows(num_rows: int) -> int:
    """So many, and half as many that may join them."""
    return num_rows + num_rows // 2


class RowSlots:
    """Rows of their own lengths in arrays: each has a place, of which slots 0 .. length-1 are its
    own. One that leaves leaves a gap, for the next that joins or, before a pass, for the last: the
    others stay where they are."""

    unit = 64  # slots; a capacity that is chosen here is a multiple of this
    spare = 2  # part of the slots that are added beside those that are needed
    lengths: list[int]
    slots: list[int]
    rows: int  # for which there is room
    capacity: int  # slots

    def parts(self) -> list[Any]:
        """The arrays: each has those of all `arrays`, and can `resize`, `put` and give a `row`,
        once it `is_initialized`."""
        raise NotImplementedError

    def reserve(self, rows: int, num_positions: int) -> None:
        """Room for so many, and for some more where there was too little."""
        if rows <= self.rows and num_positions <= self.capacity:
            return
        # of many that have left, some room
        rows = (
            max(rows, add_spare_rows(self.rows))
            if rows > self.rows
            else min(self.rows, add_spare_rows(rows))
        )
        if num_positions > self.capacity:
            num_positions = self._round_up(
                max(num_positions, self.capacity + self.capacity // self.spare)
            )
        self.grow(rows, max(num_positions, self.capacity))

    def trim(self, rows: int, num_positions: int) -> None:
        """Give up slots where these are less than half."""
        if 2 * num_positions + self.unit < self.capacity:
            self.grow(min(self.rows, add_spare_rows(rows)), self._round_up(num_positions))

    def grow(self, rows: int, capacity: int) -> None:
        """Make new arrays, with the rows in their places."""
        for part in self.list_filled_parts():
            part.resize(part.arrays, rows, capacity, count_needed_slots(self.slots))
        self.rows, self.capacity = rows, capacity

    def join(self, other: Any) -> None:
        """The rows of `other`, which is fresh, join behind these."""
        B, slots = len(self.slots), allocate_slots(self.slots, len(other.slots))
        self.reserve(count_needed_slots(slots), max(other.lengths, default=0))
        for own, theirs in zip(self.parts(), other.parts(), strict=True):
            if theirs.is_initialized and not own.is_initialized:
                own.resize(theirs.arrays, self.rows, self.capacity, count_needed_slots(self.slots))
            for b, n in enumerate(other.lengths if own.is_initialized else []):
                own.put(slots[B + b], theirs.row(other.slots[b], n) if n else own.row(0, 0))
        self.slots, self.lengths = slots, self.lengths + other.lengths

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was. Only what is repeated is copied."""
        slots, lengths = [self.slots[b] for b in rows], [self.lengths[b] for b in rows]
        self.slots, self.lengths = (
            self.copy_rows(slots, lengths, find_repeated_rows(slots)),
            lengths,
        )

    def close_gaps(self, lengths: list[int] | None = None) -> None:
        """The last rows move into the gaps, with these `lengths` if they are not their own: a pass
        takes the first places."""
        rows = find_rows_to_compact(self.slots)
        if rows:
            lengths = self.lengths if lengths is None else lengths
            self.slots = self.copy_rows(self.slots, lengths, rows)

    def copy_rows(self, slots: list[int], lengths: list[int], rows: list[int]) -> list[int]:
        """The places, where these `rows` have been copied to free ones."""
        new = reassign_slots(slots, rows)
        self.reserve(count_needed_slots(new), 0)
        for part in self.list_filled_parts():
            for b in rows:
                part.put(new[b], part.row(slots[b], lengths[b]))
        return new

    def list_filled_parts(self) -> list[Any]:
        return [part for part in self.parts() if part.is_initialized]

    def _round_up(self, num_positions: int) -> int:
        return -(-max(num_positions, 1) // self.unit) * self.unit


PREFILL_CHUNK_TOKENS = 512  # tokens of a prompt in one run: bounds the memory of a prefill
LONG_ROW_OFFSET = 2**24  # added to positions in a long row of a model that `Switches`


def list_remaining_rows(num_rows: int, leaving_rows: list[int]) -> list[int]:
    """Return those of so many rows that do not leave."""
    left = set(leaving_rows)
    return [b for b in range(num_rows) if b not in left]


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


def pad_blocks(blocks: Blocks, device: torch.device) -> Tensor:
    """Blocks as ids `[B, width]`, padded on the right with id 0, to which no real token attends."""
    if isinstance(blocks, Tensor):
        return blocks
    width = max(map(len, blocks), default=0)
    rows = [b + [0] * (width - len(b)) for b in blocks]
    return send(torch.tensor(rows, dtype=torch.long), device)


def check_sources(
    prompts: list[list[int]], sources: list[list[int]] | None, context: int | None
) -> None:
    if sources is None or len(sources) != len(prompts) or not all(sources):
        raise InputError("an encoder-decoder model needs one non-empty source for each prompt")
    longest = max(map(len, sources))
    if context is not None and longest > context:
        raise InputError(f"a source of {longest} tokens, the encoder takes {context}: shorten it")
