"""Hidden states that a target shows of its rows' tokens, kept until a drafter takes them.

Knows no models. A row's states are those of consecutive tokens; tokens that are taken back take
theirs along.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

FINAL = -1  # the tap behind the final norm: what the output layer reads


class Known(NamedTuple):
    """States of consecutive tokens of a row, from position `first` on: `[n, W]`."""

    first: int
    states: Tensor

    def since(self, position: int) -> Tensor:
        """The states from a position on; none where they begin behind it."""
        missing = self.first > position
        return self.states[len(self.states) if missing else position - self.first :]


def carried(
    before: Tensor, new: Known | None, reached: int, columns: slice | None = None
) -> Tensor:
    """The states before, and behind them what is new from the position `reached` on: of these
    columns, or all."""
    states = None if new is None else new.since(reached)
    if states is None or not len(states):
        return before
    states = states if columns is None else states[:, columns]
    return torch.cat([before, states]) if len(before) else states


class Shown:
    """The states of every row."""

    def __init__(self, rows: int = 0) -> None:
        self.rows: list[list[Known]] = [[] for _ in range(rows)]

    def join(self, other: Shown) -> None:
        """The rows of `other` join behind these."""
        self.rows = [*self.rows, *other.rows]

    def with_rows(self, count: int) -> Shown:
        """These, and so many fresh rows behind them."""
        more = Shown()
        more.rows = [*self.rows, *([] for _ in range(count))]
        return more

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was."""
        self.rows = self.selected(rows).rows

    def selected(self, rows: list[int]) -> Shown:
        """Others of which row b is row rows[b] of these."""
        others = Shown()
        others.rows = [list(self.rows[b]) for b in rows]
        return others

    def add(self, past: list[int], states: list[Tensor]) -> None:
        """Row b read tokens with these states, `[n, W]`, behind past[b] others."""
        for parts, first, new in zip(self.rows, past, states, strict=True):
            if len(new):
                parts.append(Known(first, new))

    def cut(self, lengths: list[int]) -> None:
        """So many tokens of each row remain."""
        for parts, length in zip(self.rows, lengths, strict=True):
            while parts and parts[-1].first + len(parts[-1].states) > length:
                first, states = parts.pop()
                if first < length:
                    parts.append(Known(first, states[: length - first]))

    def take(self) -> list[Known | None]:
        """Return the states of each row, which are forgotten here; None where there are none."""
        taken = [_joined(parts) if parts else None for parts in self.rows]
        self.rows = [[] for _ in self.rows]
        return taken


def _joined(parts: list[Known]) -> Known:
    if len(parts) == 1:
        return parts[0]
    return Known(parts[0].first, torch.cat([states for _, states in parts]))
