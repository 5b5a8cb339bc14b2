"""A block drafter (DFlash and others) whose forward passes have fixed shapes: one appends hidden
states to the contexts, the other runs the blocks. On CUDA both are recorded.

The keys and values at a position of a context depend only on the hidden state of this position. So
the hidden states of all sequences are appended in one list, with the slot and position of each, and
sequences are not padded to equal lengths.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from foretoken.models.graph_pass import (
    GraphPass,
    RecordingGuard,
    make_memory_pool,
    refuse_failed_recording,
)
from foretoken.models.graphs import round_up_width
from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS, round_up_to_power_of_two
from foretoken.models.stock.cache import RaggedLayer
from foretoken.models.stock.dflash import BlocksDraft, StockBlockModel
from foretoken.models.stock.fixed_cache import FixedCache, round_up_slots
from foretoken.transfer import send


class GraphBlockModel(StockBlockModel):
    """A block drafter whose passes are recorded. Only growth of the cache discards the
    recordings."""

    runtime = "graphs"

    def __init__(self, draft: BlocksDraft) -> None:
        super().__init__(draft)
        self.identity: str | None = f"{self.identity} on graphs"
        self.dtype = self.network.fc.weight.dtype
        self.network.rotary[0].to(self.device)  # a recording cannot contain this copy
        self.cache: FixedCache = self._make_fixed_cache()
        self.shape = self.cache.shape  # the shape for which passes were recorded
        self.append_passes: dict[int, GraphPass] = {}  # by number of hidden states
        self.block_passes: dict[tuple[int, int, int], GraphPass] = {}  # by slots, width and end
        self.pool: Any = None

    def _make_fixed_cache(self) -> FixedCache:
        """Return a cache with allocated layers, so that a pass can write to any slot."""
        config: Any = self.config
        like = torch.empty(
            0, config.num_key_value_heads, 0, config.head_dim, dtype=self.dtype, device=self.device
        )
        layers = [RaggedLayer() for _ in self.network.layers]
        for layer in layers:
            layer.resize((like, like), 0, 0, 0)
        return FixedCache(layers, self.device)

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        spare = round_up_to_power_of_two(len(lengths)) - len(lengths)
        return super().compute_cache_bytes(lengths + [0] * spare, sources)

    @torch.inference_mode()
    def start(self, rows: int) -> None:
        self.cache.join(self._make_cache(rows))

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        self.cache.select(rows)

    @torch.inference_mode()
    def predict_block(self, anchors: list[int], counts: list[int]) -> tuple[Tensor, Tensor]:
        cache, skip, most = self.cache, self.num_anchors, max(counts)
        width = min(round_up_width(most + skip), self.layout.block_size)
        cache.close_gaps()
        end = round_up_slots(max(cache.lengths) + width)
        cache.reserve(len(counts), end)
        masks = [self.layout.mask_token_id] * (width - 1)
        rows = [[cache.lengths[b], counts[b] + skip, anchors[b], *masks] for b in cache.order]
        run = self._get_block_pass(round_up_to_power_of_two(len(rows)), width, end)
        states, logits = run(send(torch.tensor(rows), self.device))
        slots = send(torch.tensor(cache.slots), self.device)
        return states[slots, :most], logits[slots, :most]  # indexing copies the outputs

    def _append(self, states: Tensor, counts: list[int]) -> int:
        cache, slots = self.cache, self.cache.slots
        ends = [n + new for n, new in zip(cache.lengths, counts, strict=True)]
        cache.reserve(len(slots), max(ends) + 1)
        rows = zip(slots, cache.lengths, ends, strict=True)
        places = [(slot, at) for slot, first, end in rows for at in range(first, end)]
        # padding goes to a position that is masked until a token is written there
        places += [(slots[0], ends[0])] * (round_up_to_power_of_two(len(places)) - len(places))
        sent = send(torch.tensor(places), self.device)
        starts = range(0, len(states), PREFILL_CHUNK_TOKENS)
        for start in starts:
            piece = states[start : start + PREFILL_CHUNK_TOKENS]
            size = round_up_to_power_of_two(len(piece))
            self._get_append_pass(size)(send(piece, self.device), sent[start : start + size])
        cache.advance(counts)
        return len(starts)

    def rehearse(self) -> GraphBlockModel:
        """Run and record a short pass of each kind, and return the model. Raises RefusedError if
        they cannot be recorded."""
        with refuse_failed_recording(type(self.network).__name__):
            self.start(1)
            self.append_context([torch.zeros(1, self.network.fc.in_features, device=self.device)])
            self.predict_block([0], [1])
            self.leave([0])
        return self

    def _get_append_pass(self, size: int) -> GraphPass:
        self._discard_outdated()
        if size not in self.append_passes:
            states = torch.zeros(
                size, self.network.fc.in_features, dtype=self.dtype, device=self.device
            )
            places = torch.zeros(size, 2, dtype=torch.long, device=self.device)
            self.append_passes[size] = self._make_pass(self._append_states, [states, places])
        return self.append_passes[size]

    def _append_states(self, states: Tensor, places: Tensor) -> None:
        """Write the keys and values of hidden states `[N, W]` to these slots and positions,
        `[N, 2]`."""
        slots, positions = places.unbind(1)
        made = self.network.make_context(states, positions)
        for layer, new in zip(self.cache.list_parts(), made, strict=True):
            for array, x in zip(layer.arrays, new, strict=True):
                array[slots, :, positions] = x

    def _get_block_pass(self, rows: int, width: int, end: int) -> GraphPass:
        """Return the pass with the input `numbers`, `[rows, 2 + width]`. Row i has, for the
        sequence in slot i, the length of its context, the size of its block without padding, and
        the block's ids."""
        self._discard_outdated()
        key = rows, width, end
        if key not in self.block_passes:
            numbers = torch.zeros(rows, 2 + width, dtype=torch.long, device=self.device)

            def run(numbers: Tensor) -> tuple[Tensor, Tensor]:
                self.cache.lay_out(numbers[:, 0], width, end)
                return self._run_blocks(numbers[:, 2:], numbers[:, 1])

            self.block_passes[key] = self._make_pass(run, [numbers])
        return self.block_passes[key]

    def _make_pass(self, run: Callable[..., Any], inputs: list[Tensor]) -> GraphPass:
        guard = RecordingGuard(type(self.network).__name__)
        return GraphPass(lambda *x, watched: run(*x), guard, inputs, self.pool)

    def _discard_outdated(self) -> None:
        """Discard all recordings if the cache has grown: they refer to the old tensors."""
        if self.shape != self.cache.shape:
            self.append_passes.clear()
            self.block_passes.clear()
            self.shape, self.pool = self.cache.shape, make_memory_pool(self.device)
