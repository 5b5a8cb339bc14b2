"""Recurrent states of rows, which the kernels read and write (`kernels/cpp/recurrence.h`), and
copies of them behind a prefix for rows that begin with it."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from foretoken.models.native.description import (
    LAYER_HEADER_NUMBERS,
    RING_TOKENS,
    count_channels,
    list_recurrent_layers,
)
from foretoken.models.native.network import CONVOLUTION
from foretoken.models.rewindable_states import check_rewind_to_base

NO_STATE_LENGTH = np.iinfo(np.int64).max  # tokens of a state that means nothing


class LayerStates(NamedTuple):
    """Where a layer's parts begin in a row's memory, and their sizes, in numbers."""

    window: int
    channels: int
    taps: int
    base: int
    size: int  # of its states


class StateLayout:
    """Where all layers of a network have their parts in a row's memory."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.numbers: int = facts["row_numbers"]
        self.layers = list[LayerStates]()
        # of each layer, where the tokens of its base stand, in words of 64 bits
        layers = list_recurrent_layers(facts["layers"])
        self.bases = np.array([layer["recurrence"]["at"] // 2 for layer in layers])
        for layer in layers:
            part = layer["recurrence"]
            channels, at = count_channels(layer), part["at"] + LAYER_HEADER_NUMBERS
            size = layer["heads"] * layer["width"] * part["key_width"]
            size = 0 if part["rule"] == CONVOLUTION else size
            base = at + RING_TOKENS * channels
            self.layers.append(LayerStates(at, channels, part["taps"], base, size))

    def copy_states(self, states: RecurrentStates, length: int) -> list[NDArray[np.float32]]:
        """Return copies of what follows from a row's first `length` tokens, at which its states
        stand."""
        parts = list[NDArray[np.float32]]()
        for layer in self.layers:
            head = layer.base + layer.size
            parts += [states.numbers[head : head + layer.size].copy()]
            parts += [self._window(states, layer)[_list_ring_indices(length, layer.taps)]]
        return parts

    def restore(
        self, states: RecurrentStates, length: int, parts: list[NDArray[np.float32]]
    ) -> None:
        """Let a fresh row stand where these copies do."""
        for layer, S, window in zip(self.layers, parts[::2], parts[1::2], strict=True):
            states.numbers[layer.base : layer.base + layer.size] = S
            self._window(states, layer)[_list_ring_indices(length, layer.taps)] = window
        states.integers[self.bases], states.integers[self.bases + 1] = length, NO_STATE_LENGTH

    def _window(self, states: RecurrentStates, layer: LayerStates) -> NDArray[np.float32]:
        count = RING_TOKENS * layer.channels
        return states.numbers[layer.window : layer.window + count].reshape(
            RING_TOKENS, layer.channels
        )


def _list_ring_indices(length: int, taps: int) -> NDArray[np.int64]:
    """Return the places in the ring of the tokens that a convolution reads beside the next one."""
    return np.arange(max(0, length - taps + 1), length) % RING_TOKENS


class RecurrentStates:
    """The memory of one row."""

    __slots__ = ("address", "bases", "integers", "numbers")

    def __init__(self, numbers: NDArray[np.float32], bases: NDArray[np.int64]) -> None:
        self.numbers, self.address = numbers, numbers.ctypes.data
        self.integers, self.bases = numbers.view(np.int64), bases

    @classmethod
    def create(cls, layout: StateLayout) -> RecurrentStates:
        """Return the states of a row without tokens."""
        return cls(np.zeros(layout.numbers, np.float32), layout.bases)

    def copy(self) -> RecurrentStates:
        """Return the same for another row."""
        return RecurrentStates(self.numbers.copy(), self.bases)

    def check_rewind(self, b: int, old: int, new: int) -> None:
        """Raise InputError where row b would go back to before what is kept of it."""
        check_rewind_to_base(b, old, new, int(self.integers[self.bases].max()))
