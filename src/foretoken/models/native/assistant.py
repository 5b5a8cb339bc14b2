"""Gemma 4's assistants on the native decoder: draft models that attend to the target's pages and
write none.

Each draft token takes one pass over one token after the end of each sequence. The token's input is
an embedding and a hidden state, both of the target's width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.errors import InputError
from foretoken.kernels.library import WeightRecord, choose_instruction_set, load_library
from foretoken.models.base import Model
from foretoken.models.native.description import make_weight_record
from foretoken.models.native.linear import NativeLinear
from foretoken.models.native.model import NativeModel
from foretoken.models.native.packing import BLOCK_WEIGHTS
from foretoken.models.native.passes import NativePasses, SequencePart

if TYPE_CHECKING:  # takes seconds to import
    from foretoken.models.stock.assistant import Assistant


class PackedEmbedding:
    """The embeddings of a model on the native decoder, which need no copy on torch."""

    def __init__(self, passes: NativePasses) -> None:
        self._passes, self._owned = passes, list[WeightRecord]()
        self._table = make_weight_record(passes.facts["embeddings"], passes.memory, self._owned)
        self._instructions = choose_instruction_set().encode()

    def __call__(self, ids: Tensor) -> Tensor:
        """Return the embeddings `[N, width]` of ids `[N]`, as inputs of the model's first layer."""
        width = self._passes.width
        made = torch.empty(len(ids), width + -width % BLOCK_WEIGHTS)
        for row, token in zip(made, ids.tolist(), strict=True):
            load_library().foretoken_unpack(self._instructions, self._table, token, row.data_ptr())
        return made[:, :width] * self._passes.facts["embedding_factor"]


class NativeAssistant:
    """An assistant over the sequences of `target`. It changes neither the sequences nor the KV
    cache.

    passes, facts: The converted assistant.
    network: The assistant on torch, whose output layer computes the logits if it has centroids.
    """

    def __init__(
        self, target: NativeModel, passes: NativePasses, facts: dict[str, Any], network: Assistant
    ) -> None:
        passes.read_pages(target.passes)
        self.target, self.passes, self.runtime = target, passes, target.runtime
        size = f"assistant of {facts['parameters']} parameters in {facts['computed']}"
        self.identity = facts.get("identity") or size
        self._network = network
        self._join = NativeLinear(passes.facts["join"], passes.memory, target.passes.width)
        self._rows: list[int] = []

    def with_target(self, target: Model) -> NativeAssistant:
        """Return this assistant, for the same target or a wrapper that runs it. Raises InputError
        for another target."""
        if self.target not in (target, target.model):
            raise InputError(
                "the draft uses the keys and values of the target that it was loaded for; give "
                "that target"
            )
        return self

    def begin(self, rows: list[int]) -> None:
        """Prepare the next steps for these sequences of the target, at their present lengths."""
        self._rows = rows

    def step(self, embedded: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits and hidden states that the network computes for the sequences given to
        `begin`."""
        seqs = [self.target.seqs[b] for b in self._rows]
        self.passes.input_states = torch.cat([embedded.float(), states.float()], -1)
        parts = [SequencePart(seq, seq.length, [0], 1, i) for i, seq in enumerate(seqs)]
        made = self.passes.run(parts, len(parts), 1, return_tapped=False)
        hidden, head = made.hidden[:, 0], self._network.masked_embedding
        logits = made.logits[:, 0]
        if head is not None:
            logits = head(hidden, self._network.lm_head.weight)
        return logits, self._join(hidden)
