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

from foretoken.models.rows import joined, repeated, room
from foretoken.models.states import (
    REACH,
    SLOTS,
    Arrays,
    Based,
    Cursor,
    StateLayer,
    before,
    faded,
    fold,
)

NONE: dict[str, list[Any]] = {"windows": [], "recurrences": []}  # sizes of no states
HIDDEN = -1e30  # a log decay that leaves nothing


class Recurrence(StateLayer):
    """One layer's recurrence. Its sums of decays are some heads of `shared`."""

    def __init__(self, shared: StateLayer, heads: slice, arrays: Arrays) -> None:
        self.shared, self.heads, self.arrays = shared, heads, arrays

    def sums(self, rows: slice) -> Tensor:
        return self.shared.arrays["c"][rows, self.heads]


class RowStates(Based):
    """The states of rows, of the sizes that an export found. Several graphs may read them."""

    capacity, unit = 0, 1  # there are no slots

    @torch.inference_mode(False)
    def __init__(self, sizes: dict[str, list[Any]]) -> None:
        windows, recurrences = sizes["windows"], sizes["recurrences"]
        self.taps = max((taps for taps, _ in windows), default=1)
        self.shared, self.layers = StateLayer(), list[Recurrence]()
        if windows:
            channels = sum(channels for _, channels in windows)
            self.shared.arrays["0"] = torch.zeros(0, self.taps - 1 + SLOTS, channels)
        heads = 0
        for Hk, H, Dk, Dv in recurrences:
            shapes = {"S": (H, Dk, Dv), "k": (Hk, SLOTS, Dk), "u": (H, SLOTS, Dv)}
            arrays = {name: torch.zeros(0, *shape) for name, shape in shapes.items()}
            self.layers.append(Recurrence(self.shared, slice(heads, heads + H), arrays))
            heads += H
        if heads:
            self.shared.arrays["c"] = torch.zeros(0, heads, SLOTS, 1, dtype=torch.float64)
        self.places, self.based, self.rows = [], [], 0
        self.forks: list[int] = []  # where each row's text leaves a known one
        self.sound = True  # no pass was broken off since there were no rows

    def parts(self) -> list[Any]:
        return [*self.layers, self.shared]

    def grow(self, rows: int, capacity: int) -> None:
        with torch.inference_mode(False):  # else they could not be written to outside of it
            super().grow(rows, capacity)

    def stateful(self) -> list[StateLayer]:
        return self.parts()

    @property
    def row_bytes(self) -> int:
        arrays = [x for part in self.parts() for x in part.arrays.values()]
        return sum(prod(x.shape[1:]) * x.itemsize for x in arrays)

    def entered(self, rows: int) -> tuple[list[int], list[int], list[int]]:
        """Make room for so many fresh rows; places, bases and forks with these."""
        places = joined(self.places, rows)
        self.reserve(room(places), 0)
        for place in places[len(self.places) :]:
            for part in self.parts():
                part.clear(place)
        return places, self.based + [0] * rows, self.forks + [0] * rows

    def selected(
        self, rows: list[int], lengths: list[int]
    ) -> tuple[list[int], list[int], list[int], bool]:
        """Copy what is repeated; places, bases, forks and whether all are sound, to be set
        together, where row b is what row rows[b] was."""
        sound, self.sound = self.sound or not rows, False
        places, lengths = [self.places[b] for b in rows], [lengths[b] for b in rows]
        places = self.copied(places, lengths, repeated(places))
        return places, [self.based[b] for b in rows], [self.forks[b] for b in rows], sound

    def lay_out(self, rows: list[int], past: list[int], ids: list[list[int]]) -> Laid:
        """Make room for tokens `ids` of these rows, which hold past[b], and say where they go."""
        counts = [0] * len(past)
        for b, own in zip(rows, ids, strict=True):
            counts[b] = len(own)
        sound, self.sound = self.sound, False
        self.close(past)
        pending = self.settle(rows, past, counts)
        return Laid([self.places[b] for b in rows], pending, ids, max(counts), sound)

    def keep(self, laid: Laid, made: list[Tensor]) -> None:
        """Keep what later states follow from, of the tokens of a pass that `made` this of them."""
        if "0" in self.shared.arrays:
            x = made.pop(0)[laid.tokens]  # by row
            laid.write(self.shared.arrays["0"][:, None], x[:, None], self.taps - 1)
        if "c" in self.shared.arrays:
            laid.write(self.shared.arrays["c"], made.pop(0) + laid.end)
        for layer in self.layers:
            for name in "ku":
                laid.write(layer.arrays[name], made.pop(0))
        self.sound = laid.sound

    def at(self, b: int, length: int, held: int) -> list[Tensor] | None:
        """Return copies of row b's states behind its first `length` of `held` tokens; None where
        they are not known any more."""
        base, place = self.based[b], self.places[b]
        if not (self.sound and base <= length <= held):
            return None
        moved, row = torch.tensor([length - base]), slice(place, place + 1)
        states: list[Tensor] = []
        for layer in self.layers:
            S, k, u = (layer.arrays[name][row] for name in "Sku")
            S = S.clone()
            fold(S, k, u, layer.sums(row), moved)
            states.append(S[0])
        if "0" in self.shared.arrays:
            first = length - base
            states.append(self.shared.arrays["0"][place, first : first + self.taps - 1].clone())
        return states

    def put(self, b: int, length: int, states: list[Tensor]) -> None:
        """Let a fresh row stand where these states do."""
        place, self.based[b] = self.places[b], length
        for layer, S in zip(self.layers, states, strict=False):
            layer.arrays["S"][place] = S
        if "0" in self.shared.arrays:
            self.shared.arrays["0"][place, : self.taps - 1] = states[-1]


class StateFeed:
    """The inputs and outputs of one graph that hold states."""

    def __init__(self, request: ov.InferRequest, states: RowStates) -> None:
        self.request, self.states = request, states
        self.held: dict[str, tuple[Tensor, ov.Tensor]] = {}  # a request keeps no array alive
        ports = enumerate(request.model_outputs)
        self.outputs = [i for i, port in ports if any(x.startswith("new.") for x in port.names)]

    def put(self, laid: Laid) -> None:
        """Give the graph what it reads in a pass."""
        arrays = self.states.shared.arrays
        for name, x in laid.grid().items():
            self._put(name, x)
        if "0" in arrays:
            self._put("left", before(arrays["0"][laid.span], self.states.taps, laid.at))
        if "c" in arrays:
            fade = faded(arrays["c"][laid.span], laid.at.pending)
            laid.end = fade[:, :, -1:].clone()
            hidden = torch.arange(SLOTS) >= laid.at.pending[:, None]
            fade[:, :, :-1].masked_fill_(hidden[:, None, :, None], HIDDEN)
            self._put("fade", fade.float())
        for i, layer in enumerate(self.states.layers):
            for name, x in layer.arrays.items():
                self._put(f"{name}.{i}", x[laid.span])

    def _put(self, name: str, x: Tensor) -> None:
        x, held = x.contiguous(), self.held.get(name)
        if held is not None and held[0].data_ptr() == x.data_ptr() and held[0].shape == x.shape:
            return
        self.held.pop(name, None)  # broken off here, it is bound again
        tensor = ov.Tensor(x.numpy(), shared_memory=True)
        self.request.set_tensor(name, tensor)
        self.held[name] = x, tensor

    def keep(self, laid: Laid) -> None:
        """Keep what later states follow from, of the last pass."""
        made = [torch.from_numpy(self.request.get_output_tensor(i).data) for i in self.outputs]
        self.states.keep(laid, made)


class Laid:
    """Tokens of a flat pass by row: those of some rows, in the places from the first of these on to
    the last."""

    def __init__(
        self, places: list[int], pending: list[int], ids: list[list[int]], width: int, sound: bool
    ) -> None:
        first, count = min(places), max(places) + 1 - min(places)
        self.span, self.width = slice(first, first + count), width
        self.sound = sound  # no pass was broken off before this one
        self.tokens = torch.zeros(count, width, dtype=torch.long)
        behind = [0] * count
        spots: list[int] = []
        for place, n, own in zip(places, pending, ids, strict=True):
            b, flat = place - first, len(spots)
            self.tokens[b] = flat  # its own token behind its last: another row's may be invalid
            self.tokens[b, : len(own)] = torch.arange(flat, flat + len(own))
            spots += range(b * width, b * width + len(own))
            behind[b] = n
        self.places = torch.tensor(spots)
        self.at = Cursor(behind, width, self.tokens.device)
        self.some = torch.tensor(sorted(place - first for place in places))
        self.whole = self.at.even and len(places) == count and self.at.most + width <= REACH
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
