"""The text that a position follows: a row's committed tokens and the draft tokens before the
position.

It grows and shrinks a token at a time, and what controls count is counted here, so that a control
costs the same at any length of the text.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Rewindable(Protocol):
    """A follower of the text, token by token, that can go back."""

    def push(self, token: int) -> None:
        """The text goes on by this token."""
        ...

    def pop(self) -> None:
        """Forget the last token pushed."""
        ...


class Stack:
    """Numbers in a row: NumPy's, so that a view of all of them is free."""

    def __init__(self, dtype: type[np.generic]) -> None:
        self._room, self._count = np.zeros(64, dtype), 0

    def __len__(self) -> int:
        return self._count

    def push(self, value: float) -> None:
        if self._count == len(self._room):
            self._room = np.concatenate([self._room, np.zeros_like(self._room)])
        self._room[self._count] = value
        self._count += 1

    def pop(self) -> None:
        self._count -= 1

    @property
    def values(self) -> np.ndarray:
        """A view, valid until the next push."""
        return self._room[: self._count]


class TokenCounts:
    """Which ids have occurred, in the order of their first time, and how often."""

    def __init__(self) -> None:
        self._places: dict[int, int] = {}
        self._ids, self._counts = Stack(np.int64), Stack(np.float64)

    def push(self, token: int) -> None:
        place = self._places.setdefault(token, len(self._ids))
        if place == len(self._ids):
            self._ids.push(token)
            self._counts.push(0.0)
        self._counts.values[place] += 1

    def pop(self, token: int) -> None:
        """The last token pushed: where it was the first of its kind, its place is the last."""
        place = self._places[token]
        self._counts.values[place] -= 1
        if not self._counts.values[place]:
            del self._places[token]
            self._ids.pop()
            self._counts.pop()

    def ids(self, device: torch.device) -> Tensor:
        return torch.from_numpy(self._ids.values).to(device)

    def counts(self, like: Tensor) -> Tensor:
        return torch.from_numpy(self._counts.values).to(like)


class History:
    """A text of tokens, of which the first `prompt` are given."""

    def __init__(self, prompt: list[int]) -> None:
        self.tokens: list[int] = []
        self.every, self.new = TokenCounts(), TokenCounts()
        self.prompt = len(prompt)
        self._ids = Stack(np.int64)
        for token in prompt:
            self.push(token)

    @property
    def done(self) -> int:
        """New tokens so far."""
        return len(self.tokens) - self.prompt

    def push(self, token: int) -> None:
        if len(self.tokens) >= self.prompt:
            self.new.push(token)
        self.tokens.append(token)
        self.every.push(token)
        self._ids.push(token)

    def pop(self) -> None:
        token = self.tokens.pop()
        self._ids.pop()
        self.every.pop(token)
        if len(self.tokens) >= self.prompt:
            self.new.pop(token)

    def ids(self, device: torch.device) -> Tensor:
        """All tokens, `[n]`; a copy, which others may change."""
        return torch.from_numpy(self._ids.values.copy()).to(device)
