"""A linear layer that runs on the kernels by itself, outside of a network's forward passes."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from foretoken.kernels.library import WeightRecord, choose_instruction_set, load_library
from foretoken.kernels.tokens import count_threads
from foretoken.models.native.description import make_weight_record


class NativeLinear(nn.Module):
    """A linear layer with a packed weight.

    Args:
        facts: The weight's description, from `WeightFile.append_weight`.
        memory: The mapped file of weights.
        outputs: Number of outputs, without padding.
    """

    def __init__(self, facts: dict[str, Any], memory: NDArray[np.uint8], outputs: int) -> None:
        super().__init__()
        self._memory, self._rest_records = memory, list[WeightRecord]()
        self.record = make_weight_record(facts, memory, self._rest_records)
        self.outputs, self._instructions = outputs, choose_instruction_set().encode()

    def forward(self, states: Tensor) -> Tensor:
        """Return `[N, outputs]` for states `[N, inputs]`, in float32. Raises MemoryError."""
        states = states.float().contiguous()
        made = torch.empty(len(states), self.record.outputs)
        if not load_library().foretoken_product(
            *(self._instructions, self.record, states.data_ptr(), len(states)),
            *(count_threads(), made.data_ptr()),
        ):
            raise MemoryError("not enough memory or threads for a product with packed weights")
        return made[:, : self.outputs]
