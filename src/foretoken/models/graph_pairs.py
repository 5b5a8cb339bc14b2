"""A drafter on hidden states (EAGLE-3, MTP) whose forward passes have fixed shapes, so that all
draft tokens of a step are one recording."""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from foretoken.models.base import ChainedTokens, HiddenStateDraftModel, TokenChoice
from foretoken.models.graphs import (
    MAX_SHARED_WIDTH,
    GraphModel,
    make_rehearsal_choice,
    round_up_width,
)
from foretoken.models.row_slots import check_room, round_up_to_power_of_two
from foretoken.models.stock.pairs import PairsNetwork, StockPairModel
from foretoken.transfer import send


class GraphPairModel(GraphModel, HiddenStateDraftModel):
    """A drafter on hidden states whose passes are recorded. The inputs of the first pass are copied
    to a buffer; within a chain, later inputs are made on the device."""

    capabilities = replace(GraphModel.capabilities, tensors=False, taps=False)
    eager_class = StockPairModel

    def __init__(self, network: PairsNetwork) -> None:
        super().__init__(network)
        self.identity = f"{self.eager.identity} on graphs"
        self.width, self.dtype = network.input_width, network.dtype
        self._pairs: list[Tensor] = []  # of the next pass, [n, width] for each sequence
        self._draft_pairs = torch.empty(0)  # of the next chain, of all sequences
        self._buffers: dict[tuple[int, int], Tensor] = {}  # by rows and tokens of a block

    def project_states(self, states: Tensor) -> Tensor:
        return cast(StockPairModel, self.eager).project_states(states)

    def set_next_pairs(self, pairs: Tensor, counts: list[int]) -> None:
        self._pairs = list(pairs.to(self.dtype).split(counts))

    def set_draft_pairs(self, tokens: list[int], states: Tensor, embeddings: Tensor) -> None:
        ids = send(torch.tensor(tokens), self.device)
        self._draft_pairs = self._join(ids, self.project_states(states), embeddings)

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        """Add sequences. Prompts are empty; for measurements, their pairs are zeros."""
        counts = [*([0] * len(self.lengths)), *map(len, prompts)]
        self.set_next_pairs(torch.zeros(sum(counts), self.width, device=self.device), counts)
        super().start(prompts, sources)

    @torch.inference_mode()
    def chain(
        self,
        blocks: list[list[int]],
        budget: list[int],
        choice: TokenChoice,
        embeddings: Tensor | None = None,
    ) -> ChainedTokens:
        counts = list(map(len, blocks))
        added = [n + max(0, g - 1) for n, g in zip(counts, budget, strict=True)]
        check_room(self.lengths, added, self.compute_max_lengths(self.long))
        self.set_next_pairs(self._draft_pairs, counts)
        heads = [n - 1 if n > MAX_SHARED_WIDTH else 0 for n in counts]
        if any(heads):  # a prompt, which must not widen the chain of all sequences
            pairs = [x[n:] for x, n in zip(self._pairs, heads, strict=True)]
            self.score([x[:n] for x, n in zip(blocks, heads, strict=True)], [0] * len(blocks))
            self._pairs, blocks = pairs, [x[n:] for x, n in zip(blocks, heads, strict=True)]
            counts = list(map(len, blocks))
        width = round_up_width(max(counts))
        self.cache.close_gaps()
        shape = round_up_to_power_of_two(len(counts)), width
        self._fill_buffer(self.cache.order, 0, shape)
        return self._run_chain(blocks, width, budget, choice, embeddings)

    def rehearse(self) -> None:
        for n in (1, 2):
            self.set_next_pairs(torch.zeros(n, self.width, device=self.device), [n])
            self.score([[0] * n], [1])
        choice = make_rehearsal_choice(self.vocab_size)
        E = cast(PairsNetwork, self.model).width
        self._draft_pairs = torch.zeros(1, self.width, device=self.device)
        self.chain([[0]], [2], choice, torch.zeros(self.vocab_size, E, device=self.device))

    def _fill_buffer(self, rows: list[int], start: int, shape: tuple[int, int]) -> None:
        """Copy the next pairs of these sequences, from token `start` of their blocks on, to the
        buffer of this shape, padded with zeros."""
        end = start + shape[1]
        pairs = pad_sequence([self._pairs[b][start:end] for b in rows], batch_first=True)
        if shape not in self._buffers:
            self._buffers[shape] = pairs.new_zeros(*shape, self.width)
        self._buffers[shape].zero_()
        self._buffers[shape][: len(rows), : pairs.shape[1]] = pairs

    def _make_pairs(self, ids: Tensor, states: Tensor | None, table: Tensor | None) -> Tensor:
        if states is None or table is None:
            return self._buffers[ids.shape[0], ids.shape[1]]
        return self._join(ids, states, table)

    def _join(self, ids: Tensor, states: Tensor, table: Tensor) -> Tensor:
        """Return pairs of the ids' embeddings and these hidden states."""
        return torch.cat([F.embedding(ids, table).to(self.dtype), states.to(self.dtype)], -1)
