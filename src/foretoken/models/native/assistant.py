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
from foretoken.kernels.library import WeightRecord
from foretoken.models.base import Model
from foretoken.models.native.description import make_weight_record
from foretoken.models.native.model import NativeModel, multiply
from foretoken.models.native.passes import NativePasses, SequencePart

if TYPE_CHECKING:  # takes seconds to import
    from foretoken.models.stock.assistant import Assistant


class NativeAssistant:
    """An assistant over the sequences of `target`. It changes neither the sequences nor the KV
    cache.

    network: The assistant on torch, whose head computes the logits if it has centroids.
    """

    def __init__(
        self, target: NativeModel, passes: NativePasses, facts: dict[str, Any], network: Assistant
    ) -> None:
        self.target, self.passes, self.runtime = target, passes, target.runtime
        self._facts, self._network = facts, network
        self.identity = facts.get("identity") or f"an assistant in {facts['computed']}"
        self._rest_records: list[WeightRecord] = []
        join = passes.facts["join"]
        self._join = make_weight_record(join, passes.memory, self._rest_records)
        self._rows: list[int] = []

    def with_target(self, target: Model) -> NativeAssistant:
        """Return an assistant with the same network for another target, which must be this target,
        or a wrapper that runs it. Raises InputError for another target."""
        if self.target not in (target, getattr(target, "model", None)):
            raise InputError(
                "the draft attends to the keys and values of the target that it was loaded for; "
                "give that target"
            )
        return NativeAssistant(self.target, self.passes, self._facts, self._network)

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
        return logits, multiply(self._join, hidden)[:, : embedded.shape[1]]
