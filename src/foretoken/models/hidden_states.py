"""Hidden states that a target shows of its rows' tokens, kept until a drafter takes them.

Knows no models. A row's states are those of consecutive tokens; tokens that are taken back take
theirs along.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FINAL_TAP = -1  # the tap behind the final norm: what the output layer reads


class HiddenStates(NamedTuple):
    """States of consecutive tokens of a row, from position `first` on: `[n, W]`."""

    first: int
    states: Tensor

    def get_from(self, position: int) -> Tensor:
        """The states from a position on; none where they begin behind it."""
        missing = self.first > position
        return self.states[len(self.states) if missing else position - self.first :]


def append_new_states(
    old: Tensor, new: HiddenStates | None, position: int, columns: slice | None = None
) -> Tensor:
    """The states before, and behind them what is new from the position `position` on: of these
    columns, or all."""
    states = None if new is None else new.get_from(position)
    if states is None or not len(states):
        return old
    states = states if columns is None else states[:, columns]
    return torch.cat([old, states]) if len(old) else states


class HiddenStateStore:
    """The states of every row."""

    def __init__(self, rows: int = 0) -> None:
        self.rows: list[list[HiddenStates]] = [[] for _ in range(rows)]

    def join(self, other: HiddenStateStore) -> None:
        """The rows of `other` join behind these."""
        self.rows = [*self.rows, *other.rows]

    def copy_with_rows(self, count: int) -> HiddenStateStore:
        """These, and so many fresh rows behind them."""
        more = HiddenStateStore()
        more.rows = [*self.rows, *([] for _ in range(count))]
        return more

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was."""
        self.rows = self.copy_rows(rows).rows

    def copy_rows(self, rows: list[int]) -> HiddenStateStore:
        """Others of which row b is row rows[b] of these."""
        others = HiddenStateStore()
        others.rows = [list(self.rows[b]) for b in rows]
        return others

    def add(self, past: list[int], states: list[Tensor]) -> None:
        """Row b read tokens with these states, `[n, W]`, behind past[b] others."""
        for parts, first, new in zip(self.rows, past, states, strict=True):
            if len(new):
                parts.append(HiddenStates(first, new))

    def truncate(self, lengths: list[int]) -> None:
        """So many tokens of each row remain."""
        for parts, length in zip(self.rows, lengths, strict=True):
            while parts and parts[-1].first + len(parts[-1].states) > length:
                first, states = parts.pop()
                if first < length:
                    parts.append(HiddenStates(first, states[: length - first]))

    def take(self) -> list[HiddenStates | None]:
        """Return the states of each row, which are forgotten here; None where there are none."""
        taken = [_concatenate(parts) if parts else None for parts in self.rows]
        self.rows = [[] for _ in self.rows]
        return taken


def _concatenate(parts: list[HiddenStates]) -> HiddenStates:
    if len(parts) == 1:
        return parts[0]
    return HiddenStates(parts[0].first, torch.cat([states for _, states in parts]))
