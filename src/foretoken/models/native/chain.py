"""A draft's tokens in one call: a pass, and one over each token after it, by the kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from foretoken.kernels.library import ChainRecord, SoftmaxRecord
from foretoken.models.base import ChainedTokens, TokenChoice
from foretoken.models.native.pages import PagedRow

KINDS = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}  # of embeddings, in network.h


class DraftChain:
    """Room for what the draft's passes give, and its record for the kernels.

    Args:
        budget: The tokens of each row, `[B]`.
        first: The position of each row's first token, `[B]`.
        apart: How far each row's rotary positions are from these, `[B]`.
        rows: The rows, `[B]`.
        Vd: The draft's ids.
        choice: How tokens are chosen.
        embeddings: The embeddings that a decoder of pairs reads, `[V, E]`; None for others.
    """

    def __init__(
        self,
        budget: list[int],
        first: list[int],
        apart: list[int],
        rows: list[PagedRow],
        Vd: int,
        choice: TokenChoice,
        embeddings: Tensor | None,
    ) -> None:
        B, G, V = len(budget), max(budget), choice.V
        # where all rows make as many tokens, all of it is written
        make = torch.empty if min(budget) == G else torch.zeros
        self.made = ChainedTokens(
            make(B, G, dtype=torch.int64),
            make(B, G),
            None if choice.filters is None else (make if V == Vd else torch.zeros)(B, G, V),
            torch.ones(B, G, dtype=torch.float64),
        )
        record = ChainRecord(B, G, V, 0 if embeddings is None else KINDS[embeddings.dtype])
        sources = [row.source for row in rows if row.source is not None]
        lengths = [source.length for source in sources] or [0] * B
        numbers = np.array([budget, first, apart, lengths], np.int32)
        tables = np.array([row.table for row in [*rows, *sources]], np.uint64)
        at, record.pages_of = numbers.ctypes.data, tables.ctypes.data
        record.budget, record.next, record.apart = at, at + 4 * B, at + 8 * B
        own = [row.states.address for row in rows if row.states is not None]
        states = np.array(own, np.uint64)
        if own:
            record.states_of = states.ctypes.data
        if sources:
            record.sources_of, record.length_of = tables[B:].ctypes.data, at + 12 * B
        temperature, top_k, top_p, min_p = choice.filters or (1.0, 0, 1.0, 0.0)
        record.choice = SoftmaxRecord(
            1, Vd, 1, 0 if top_k >= Vd else top_k, temperature, min_p, top_p
        )
        narrow = torch.empty(Vd) if self.made.q is not None and choice.ids is not None else None
        tensors = {"u": choice.numbers, "ids": choice.ids, "embeddings": embeddings}
        tensors |= {"narrow": narrow, **self.made._asdict()}
        for name, tensor in tensors.items():
            setattr(record, name, None if tensor is None else tensor.data_ptr())
        self.record = record
        self._memory = numbers, tables, states, tensors  # what the record points to

    def reuse(
        self, inputs: dict[str, Any], pages: Any, sources: Any, states: Any, given: Tensor | None
    ) -> None:
        """Let passes write their arrays where the first pass had its own."""
        record = self.record
        record.pages, record.sources = pages.ctypes.data, sources.ctypes.data
        record.states = states.ctypes.data
        record.given = None if given is None else given.data_ptr()
        record.id = inputs["ids"].ctypes.data
        for name in ("at", "turn", "row", "need", "place", "source_length"):
            setattr(record, name, inputs[name].ctypes.data)
