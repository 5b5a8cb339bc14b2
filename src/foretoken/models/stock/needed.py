"""The output layer, applied only to the positions that are needed.

A block's hidden states are cut down by a forward pre-hook of the layer, so a prefill never makes
rows as wide as the vocabulary, whatever the family does between its last layer and its head.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn

from foretoken.transfer import sent


class HeadHook(Protocol):
    """Decides which positions enter the output layer."""

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None: ...


class Needed:
    """The last need[b] of counts[b] tokens, of blocks padded on the right to one width, which
    stand in `places`."""

    def __init__(
        self, counts: list[int], need: list[int], places: list[int], device: torch.device
    ) -> None:
        assert all(n <= x for n, x in zip(need, counts, strict=True)), "more than a block has"
        self.most = max(need)
        starts = [x - n if n else None for n, x in zip(need, counts, strict=True)]
        firsts = {start for start in starts if start is not None} or {0}
        self.first = firsts.pop()
        self.even = not firsts and places == list(range(len(places)))
        self.hidden: Tensor | None = None  # what the output layer read: these positions only
        self.padding: Tensor | None = None  # [B, max(need), 1], True there; None: there is none
        if min(need) < self.most:
            missing = torch.arange(self.most) >= torch.tensor(need)[:, None]
            self.padding = sent(missing[..., None], device)
        if not self.even:
            last = max(counts) - 1
            tokens = [[min((s or 0) + i, last) for i in range(self.most)] for s in starts]
            self.rows = sent(torch.tensor(places), device)[:, None]
            self.tokens = sent(torch.tensor(tokens, dtype=torch.long), device)  # of none too

    def of(self, x: Tensor) -> Tensor:
        """`[B, width, n]`, by place -> `[B, max(need), n]`, by row; one that needs fewer is padded
        with zeros, as its others may be invalid, which is no mate's concern."""
        if self.even:
            some = x[:, self.first : self.first + self.most]
        else:
            some = x[self.rows, self.tokens]
        return some if self.padding is None else some.masked_fill(self.padding, 0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.hidden = self.of(args[0])
        return self.hidden, *args[1:]

    def logits(self, logits: Tensor) -> Tensor:
        """A model's logits as `[B, max(need), V]`, also where its head is no layer with a hook."""
        return self.of(logits) if self.hidden is None else logits


class KeptPositions:
    """Lets hidden states at flat places of a block through, `[1, N, H]`, in a form for tracing."""

    def __init__(self, places: Tensor) -> None:
        self.places = places
        self.hidden = torch.empty(0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = args[0].reshape(-1, args[0].shape[-1])
        self.hidden = rows.index_select(0, self.places)[None]
        return self.hidden, *args[1:]


class Read:
    """Lets everything through and notes it."""

    def __init__(self) -> None:
        self.hidden = torch.empty(0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        self.hidden: Tensor = args[0]
