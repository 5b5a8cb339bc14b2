"""Slots of sequences in a cache's arrays, checks of lengths and sources, and padding of blocks, for
all backends.

A sequence's slot is its index in the arrays. The slot usually stays the same when the sequence's
row in the batch changes. This module does not import transformers, whose import takes seconds.
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
    """Return the slots of all sequences, with a new slot for each row in `rows`: the first slots
    that no sequence uses."""
    used, new = set(slots), list(slots)
    free = (slot for slot in itertools.count() if slot not in used)
    for b in rows:
        new[b] = next(free)
    return new


def allocate_slots(slots: list[int], num_rows: int) -> list[int]:
    """Return `slots` followed by the slots of `num_rows` new sequences: the first free slots."""
    return reassign_slots(slots + [-1] * num_rows, list(range(len(slots), len(slots) + num_rows)))


def find_repeated_rows(slots: list[int]) -> list[int]:
    """Return the indices of sequences that have the same slot as an earlier sequence."""
    return [b for b, slot in enumerate(slots) if slot in slots[:b]]


def find_rows_to_compact(slots: list[int]) -> list[int]:
    """Return the indices of sequences that must move to free slots below B, the batch size."""
    return [b for b, slot in enumerate(slots) if slot >= len(slots)]


def order_by_slot(slots: list[int]) -> list[int]:
    """Return the indices of sequences in the order of their slots."""
    return sorted(range(len(slots)), key=slots.__getitem__)


def count_needed_slots(slots: list[int]) -> int:
    """Return the number of slots that the arrays need for sequences in these slots."""
    return 1 + max(slots, default=-1)


def compute_max_positions(lengths: list[int], unit: int) -> int:
    """Return the maximum number of positions of all slots together, for sequences of these lengths.
    Each slot's capacity is less than twice the longest length, rounded up to a multiple of
    `unit`."""
    return len(lengths) * 2 * (max(lengths, default=0) + unit)


def round_up_to_power_of_two(n: int) -> int:
    """Return the smallest power of two that is at least n; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def add_spare_rows(num_rows: int) -> int:
    """Return `num_rows` plus half as many, for sequences that may join later."""
    return num_rows + num_rows // 2


class RowSlots:
    """Sequences of different lengths in arrays `[slots, ..]`. Each sequence has a slot, and its
    tokens use the first positions of this slot. A sequence that leaves frees its slot for the next
    one that joins. Before a forward pass, sequences move into free slots so that B sequences fill
    the first B slots."""

    unit = 64  # capacities are rounded up to a multiple of this number of positions
    spare = 2  # growth adds at least 1/spare of the present capacity
    lengths: list[int]  # by row
    slots: list[int]  # by row
    rows: int  # number of slots in the arrays
    capacity: int  # positions per slot

    def list_parts(self) -> list[Any]:
        """Return the parts of the cache, one for each layer. A part has `arrays`, `is_initialized`
        and the methods `resize`, `put` and `get_row`."""
        raise NotImplementedError

    def reserve(self, rows: int, num_positions: int) -> None:
        """Make room for `rows` slots of `num_positions` positions. Arrays that must grow get some
        spare room."""
        if rows <= self.rows and num_positions <= self.capacity:
            return
        # if many sequences have left, this also reduces the number of slots
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
        """Shrink the arrays if their capacity is more than twice `num_positions`."""
        if 2 * num_positions + self.unit < self.capacity:
            self.grow(min(self.rows, add_spare_rows(rows)), self._round_up(num_positions))

    def grow(self, rows: int, capacity: int) -> None:
        """Replace the arrays by arrays of this size, with every sequence in its present slot."""
        for part in self.list_filled_parts():
            part.resize(part.arrays, rows, capacity, count_needed_slots(self.slots))
        self.rows, self.capacity = rows, capacity

    def join(self, other: Any) -> None:
        """Append the sequences of another cache, `other`."""
        B, slots = len(self.slots), allocate_slots(self.slots, len(other.slots))
        self.reserve(count_needed_slots(slots), max(other.lengths, default=0))
        for own, theirs in zip(self.list_parts(), other.list_parts(), strict=True):
            if theirs.is_initialized and not own.is_initialized:
                own.resize(theirs.arrays, self.rows, self.capacity, count_needed_slots(self.slots))
            for b, n in enumerate(other.lengths if own.is_initialized else []):
                own.put(slots[B + b], theirs.get_row(other.slots[b], n) if n else own.get_row(0, 0))
        self.slots, self.lengths = slots, self.lengths + other.lengths

    def select(self, rows: list[int]) -> None:
        """Replace sequence b by the former sequence rows[b]. Arrays are copied only for sequences
        that occur several times."""
        slots, lengths = [self.slots[b] for b in rows], [self.lengths[b] for b in rows]
        self.slots, self.lengths = (
            self.copy_rows(slots, lengths, find_repeated_rows(slots)),
            lengths,
        )

    def close_gaps(self, lengths: list[int] | None = None) -> None:
        """Move sequences into free slots so that they fill the first B slots, which a forward pass
        uses. lengths: how many positions of each sequence to copy; None: all."""
        rows = find_rows_to_compact(self.slots)
        if rows:
            lengths = self.lengths if lengths is None else lengths
            self.slots = self.copy_rows(self.slots, lengths, rows)

    def copy_rows(self, slots: list[int], lengths: list[int], rows: list[int]) -> list[int]:
        """Copy the sequences in `rows` to free slots; return the slots of all sequences."""
        new = reassign_slots(slots, rows)
        self.reserve(count_needed_slots(new), 0)
        for part in self.list_filled_parts():
            for b in rows:
                part.put(new[b], part.get_row(slots[b], lengths[b]))
        return new

    def list_filled_parts(self) -> list[Any]:
        return [part for part in self.list_parts() if part.is_initialized]

    def _round_up(self, num_positions: int) -> int:
        return -(-max(num_positions, 1) // self.unit) * self.unit


PREFILL_CHUNK_TOKENS = 512  # prompt tokens per forward pass: bounds the memory of a prefill
LONG_ROW_OFFSET = 2**24  # added to the positions of long sequences (`Model.set_long_context`)


def list_remaining_rows(num_rows: int, leaving_rows: list[int]) -> list[int]:
    """Return the indices of the sequences that do not leave."""
    left = set(leaving_rows)
    return [b for b in range(num_rows) if b not in left]


def check_lengths(old: list[int], new: list[int]) -> None:
    """Raise InputError unless each new length is from 0 to the old length."""
    if len(old) != len(new) or any(not 0 <= n <= o for o, n in zip(old, new, strict=True)):
        raise InputError(
            f"the new lengths are {new} for sequences of {old} tokens; give one length for each "
            "sequence, at most the present length"
        )


def check_room(
    lengths: list[int], counts: list[int], context: int | None | list[int | None]
) -> None:
    """Raise InputError if counts[b] more tokens would make sequence b longer than `context` allows.
    context: one limit for all sequences, or a list of limits; None: no limit."""
    if len(lengths) != len(counts):
        raise InputError(f"{len(counts)} blocks for {len(lengths)} sequences; give one block each")
    if context is None:
        return
    limits = context if isinstance(context, list) else [context] * len(lengths)
    for b, (n, count, limit) in enumerate(zip(lengths, counts, limits, strict=True)):
        if limit is not None and n + count > limit and count:
            raise InputError(
                f"sequence {b} would have {n + count} tokens, but the context length is {limit}; "
                "shorten the sequence"
            )


def pad_blocks(blocks: Blocks, device: torch.device) -> Tensor:
    """Return blocks as ids `[B, width]`, padded on the right with id 0. No token of a sequence
    attends to the padding."""
    if isinstance(blocks, Tensor):
        return blocks
    width = max(map(len, blocks), default=0)
    rows = [b + [0] * (width - len(b)) for b in blocks]
    return send(torch.tensor(rows, dtype=torch.long), device)


def cut_blocks(
    blocks: Blocks, rows: list[int], start: int, width: int, device: torch.device
) -> Tensor:
    """Return up to `width` ids of the blocks of these sequences, from token `start` on, padded on
    the right with id 0."""
    if not isinstance(blocks, Tensor):
        return pad_blocks([blocks[b][start : start + width] for b in rows], device)
    cut = blocks[:, start : start + width]
    if rows == list(range(len(blocks))):
        return cut
    return cut[send(torch.tensor(rows), device)]


def check_sources(
    prompts: list[list[int]], sources: list[list[int]] | None, context: int | None
) -> None:
    """Raise InputError unless there is one non-empty source for each prompt, and all sources fit
    the encoder's context."""
    if sources is None or len(sources) != len(prompts) or not all(sources):
        raise InputError("an encoder-decoder model needs one non-empty source for each prompt")
    longest = max(map(len, sources))
    if context is not None and longest > context:
        raise InputError(
            f"a source has {longest} tokens, but the encoder's context is {context}; "
            "shorten the source"
        )
