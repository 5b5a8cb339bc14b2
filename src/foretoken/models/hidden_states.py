"""Hidden states of a target's tokens, stored until a drafter takes them.

Each sequence's states belong to consecutive tokens. Truncating a sequence drops the states of the
removed tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FINAL_TAP = -1  # the tap after the final norm, whose hidden states enter the output layer


class HiddenStates(NamedTuple):
    """Hidden states `[n, W]` of consecutive tokens of a sequence, from position `first` on."""

    first: int
    states: Tensor

    def get_from(self, position: int) -> Tensor:
        """Return the states from `position` on. If `first` is greater than `position`, return none,
        since the states in between are missing."""
        missing = self.first > position
        return self.states[len(self.states) if missing else position - self.first :]


def append_new_states(
    old: Tensor, new: HiddenStates | None, position: int, columns: slice | None = None
) -> Tensor:
    """Return `old` followed by the states of `new` from `position` on, or `old` itself if `new` has
    no such states. columns: the hidden dimensions to append; None: all."""
    states = None if new is None else new.get_from(position)
    if states is None or not len(states):
        return old
    states = states if columns is None else states[:, columns]
    return torch.cat([old, states]) if len(old) else states


class HiddenStateStore:
    """The hidden states of all sequences of a batch."""

    def __init__(self, rows: int = 0) -> None:
        self.rows: list[list[HiddenStates]] = [[] for _ in range(rows)]

    def join(self, other: HiddenStateStore) -> None:
        """Append the sequences of `other`."""
        self.rows = [*self.rows, *other.rows]

    def copy_with_rows(self, count: int) -> HiddenStateStore:
        """Return a copy, with `count` more sequences that have no states."""
        more = HiddenStateStore()
        more.rows = [*self.rows, *([] for _ in range(count))]
        return more

    def select(self, rows: list[int]) -> None:
        """Replace sequence b by the former sequence rows[b]."""
        self.rows = self.copy_rows(rows).rows

    def copy_rows(self, rows: list[int]) -> HiddenStateStore:
        """Return a copy whose sequence b is this store's sequence rows[b]."""
        others = HiddenStateStore()
        others.rows = [list(self.rows[b]) for b in rows]
        return others

    def add(self, past: list[int], states: list[Tensor]) -> None:
        """Append states `[n, W]` to each sequence b, for its tokens from position past[b] on."""
        for parts, first, new in zip(self.rows, past, states, strict=True):
            if len(new):
                parts.append(HiddenStates(first, new))

    def truncate(self, lengths: list[int]) -> None:
        """Drop the states of each sequence b from position lengths[b] on."""
        for parts, length in zip(self.rows, lengths, strict=True):
            while parts and parts[-1].first + len(parts[-1].states) > length:
                first, states = parts.pop()
                if first < length:
                    parts.append(HiddenStates(first, states[: length - first]))

    def take(self) -> list[HiddenStates | None]:
        """Return the states of each sequence (None for a sequence without states), and empty the
        store."""
        taken = [_concatenate(parts) if parts else None for parts in self.rows]
        self.rows = [[] for _ in self.rows]
        return taken


def _concatenate(parts: list[HiddenStates]) -> HiddenStates:
    if len(parts) == 1:
        return parts[0]
    return HiddenStates(parts[0].first, torch.cat([states for _, states in parts]))
