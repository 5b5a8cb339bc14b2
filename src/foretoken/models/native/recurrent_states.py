"""The memory of sequences' recurrent states, which the kernels read and write
(`kernels/cpp/recurrence.h`), and copies of states for the prefix cache."""

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

NO_STATE_LENGTH = np.iinfo(np.int64).max  # length of an invalid state: no sequence is as long


class LayerStates(NamedTuple):
    """Offsets and sizes, in floats, of a layer's states in a sequence's memory."""

    window: int  # offset of the ring of the convolution's inputs, [RING_TOKENS, channels]
    channels: int
    taps: int  # tokens in the window of the convolution
    # offset of the base state, from which the state after a rollback is computed; the head state,
    # the latest one, follows the base state
    base: int
    size: int  # size of the base state, and of the head state; 0: no recurrence


class StateLayout:
    """Offsets of the states of all recurrent layers in a sequence's memory."""

    def __init__(self, facts: dict[str, Any]) -> None:
        self.numbers: int = facts["row_numbers"]
        self.layers = list[LayerStates]()
        # for each layer, the index, in 64-bit words, of its base state's number of tokens; the head
        # state's number of tokens follows
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
        """Return copies of the states after a sequence's first `length` tokens. Call
        `NativePasses.settle` before, so that the head state is at this length."""
        parts = list[NDArray[np.float32]]()
        for layer in self.layers:
            head = layer.base + layer.size
            parts += [states.numbers[head : head + layer.size].copy()]
            parts += [self._window(states, layer)[_list_ring_indices(length, layer.taps)]]
        return parts

    def restore(
        self, states: RecurrentStates, length: int, parts: list[NDArray[np.float32]]
    ) -> None:
        """Set the states of a new sequence to `parts`, copies that `copy_states` made after
        `length` tokens."""
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
    """Return the ring indices of the last tokens before position `length`, which the next token's
    convolution takes as inputs."""
    return np.arange(max(0, length - taps + 1), length) % RING_TOKENS


class RecurrentStates:
    """The recurrent states of one sequence in all layers."""

    __slots__ = ("address", "bases", "integers", "numbers")

    def __init__(self, numbers: NDArray[np.float32], bases: NDArray[np.int64]) -> None:
        self.numbers, self.address = numbers, numbers.ctypes.data
        self.integers, self.bases = numbers.view(np.int64), bases

    @classmethod
    def create(cls, layout: StateLayout) -> RecurrentStates:
        """Return the states of an empty sequence."""
        return cls(np.zeros(layout.numbers, np.float32), layout.bases)

    def copy(self) -> RecurrentStates:
        """Return an independent copy."""
        return RecurrentStates(self.numbers.copy(), self.bases)

    def check_rewind(self, b: int, old: int, new: int) -> None:
        """Raise InputError if sequence b cannot be rewound from `old` to `new` tokens: a sequence
        can only be rewound to its layers' base states or later, or to 0 tokens."""
        check_rewind_to_base(b, old, new, int(self.integers[self.bases].max()))
