"""States of hybrid models beside pages: where each row's states stand, what a flat pass reads of
them, and what it leaves.

The arrays are torch's, by place, and a graph reads them where they are. `export_states` says what
the inputs and outputs mean. Knows no models and no keys.
"""

from __future__ import annotations

from math import prod
from typing import Any

import openvino as ov
import torch
from torch import Tensor

from foretoken.models.rows import joined, room
from foretoken.models.states import REACH, Arrays, Based, Cursor, StateLayer, before, faded

HIDDEN = -1e30  # a log decay that leaves nothing


class Recurrence(StateLayer):
    """One layer's recurrence. Its sums of decays are some heads of `shared`, which has all layers'."""

    def __init__(self, shared: StateLayer, heads: slice, arrays: Arrays) -> None:
        self.shared, self.heads, self.arrays = shared, heads, arrays

    def sums(self, rows: slice) -> Tensor:
        return self.shared.arrays["c"][rows, self.heads]


class RowStates(Based):
    """The states of rows for one graph, whose export found these `sizes`."""

    capacity, unit = 0, 1  # there are no slots

    def __init__(self, request: ov.InferRequest, sizes: dict[str, list[Any]]) -> None:
        windows, recurrences = sizes["windows"], sizes["recurrences"]
        self.request = request
        self.taps = max((taps for taps, _ in windows), default=1)
        self.shared, self.layers = StateLayer(), list[Recurrence]()
        if windows:
            channels = sum(channels for _, channels in windows)
            self.shared.arrays["0"] = torch.zeros(0, self.taps - 1 + REACH, channels)
        heads = 0
        for Hk, H, Dk, Dv in recurrences:
            shapes = {"S": (H, Dk, Dv), "k": (Hk, REACH, Dk), "u": (H, REACH, Dv)}
            arrays = {name: torch.zeros(0, *shape) for name, shape in shapes.items()}
            self.layers.append(Recurrence(self.shared, slice(heads, heads + H), arrays))
            heads += H
        if heads:
            self.shared.arrays["c"] = torch.zeros(0, heads, REACH, 1, dtype=torch.float64)
        self.lengths, self.places, self.based, self.rows = [], [], [], 0
        self.held: dict[str, ov.Tensor] = {}  # a request keeps no array alive
        self.bound = slice(0, 0)  # the places that the graph reads

    def parts(self) -> list[Any]:
        return [*self.layers, self.shared]

    def stateful(self) -> list[StateLayer]:
        return self.parts()

    @property
    def row_bytes(self) -> int:
        arrays = [x for part in self.parts() for x in part.arrays.values()]
        return sum(prod(x.shape[1:]) * x.itemsize for x in arrays)

    def grow(self, rows: int, capacity: int) -> None:
        self.bound = slice(0, 0)
        super().grow(rows, capacity)

    def enter(self, rows: int) -> None:
        """So many fresh rows join."""
        places = joined(self.places, rows)
        self.reserve(room(places), 0)
        for place in places[len(self.places) :]:
            for part in self.parts():
                part.clear(place)
        self.places, self.lengths = places, self.lengths + [0] * rows
        self.based = self.based + [0] * rows

    def lay_out(self, rows: list[int], past: list[int], ids: list[list[int]]) -> Laid:
        """Give the graph what it reads of states in a pass over tokens `ids` of these rows."""
        self.lengths, width = list(past), max(map(len, ids))
        self.close()
        pending = self.settle(width, rows, past)
        laid = Laid([self.places[b] for b in rows], pending, ids, width)
        for name, x in laid.grid().items():
            self._put(name, x)
        if "0" in self.shared.arrays:
            self._put("left", before(self.shared.arrays["0"][laid.span], self.taps, laid.at))
        if "c" in self.shared.arrays:
            fade = faded(self.shared.arrays["c"][laid.span], laid.at.pending)
            laid.end = fade[:, :, -1:].clone()
            hidden = torch.arange(REACH) >= laid.at.pending[:, None]
            fade[:, :, :-1].masked_fill_(hidden[:, None, :, None], HIDDEN)
            self._put("fade", fade.float())
        self._bind(laid.span)
        return laid

    def _bind(self, span: slice) -> None:
        """Let the graph read these places."""
        if span == self.bound:
            return
        self.bound = slice(0, 0)  # broken off here, it is bound again
        for i, layer in enumerate(self.layers):
            for name, x in layer.arrays.items():
                self._put(f"{name}.{i}", x[span])
        self.bound = span

    def _put(self, name: str, x: Tensor) -> None:
        tensor = ov.Tensor(x.contiguous().numpy(), shared_memory=True)
        self.request.set_tensor(name, tensor)
        self.held[name] = tensor

    def keep(self, laid: Laid) -> None:
        """Keep what later states follow from, of the tokens of the last pass."""
        outputs = range(2, len(self.request.model_outputs))  # behind logits and hidden states
        made = [torch.from_numpy(self.request.get_output_tensor(i).data) for i in outputs]
        if "0" in self.shared.arrays:
            x = made.pop(0)[laid.tokens]  # by row
            laid.write(self.shared.arrays["0"][:, None], x[:, None], self.taps - 1)
        if "c" in self.shared.arrays:
            laid.write(self.shared.arrays["c"], made.pop(0) + laid.end)
        for layer in self.layers:
            for name in "ku":
                laid.write(layer.arrays[name], made.pop(0))


class Laid:
    """Tokens of a flat pass by row: those of some rows, in the places from the first of these on to
    the last."""

    def __init__(
        self, places: list[int], pending: list[int], ids: list[list[int]], width: int
    ) -> None:
        first, count = min(places), max(places) + 1 - min(places)
        self.span, self.width = slice(first, first + count), width
        self.tokens = torch.zeros(count, width, dtype=torch.long)
        behind = [0] * count
        spots: list[int] = []
        for place, n, own in zip(places, pending, ids, strict=True):
            b, flat = place - first, len(spots)
            self.tokens[b, : len(own)] = torch.arange(flat, flat + len(own))
            spots += range(b * width, b * width + len(own))
            behind[b] = n
        self.places = torch.tensor(spots)
        self.at = Cursor(behind, width, self.tokens.device)
        self.some = torch.tensor(sorted(place - first for place in places))
        self.whole = self.at.even and len(places) == count
        self.end = torch.empty(0)  # the sums of log decays at the rows' ends

    def grid(self) -> dict[str, Tensor]:
        """Return the inputs that `export_states.Grid` describes."""
        rows = self.places // self.width
        return {"grid.tokens": self.tokens, "grid.places": self.places, "grid.rows": rows}

    def write(self, array: Tensor, new: Tensor, shift: int = 0) -> None:
        """Write new tokens `[B, H, W, D]` behind those of the rows in `array [rows, H, .., D]`."""
        if self.whole:
            start = shift + self.at.most
            array[self.span, :, start : start + self.width] = new
        else:
            rows, slots = self.some + self.span.start, shift + self.at.slots[self.some]
            array[rows[:, None], :, slots] = new[self.some].transpose(1, 2)
