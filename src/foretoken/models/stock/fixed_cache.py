"""KV caches of fixed shapes, over which forward passes can be recorded as CUDA graphs.

Numbers of slots and positions are rounded up to a few values and never shrink, so that few
recordings are needed. For an encoder-decoder, the keys and values of the sources have a capacity of
their own. The mask of the sources' padding is computed on the device, from the sources' lengths.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from foretoken.models.row_slots import round_up_to_power_of_two
from foretoken.models.stock.cache import CAPACITY_MULTIPLE, CrossCache, RaggedCache
from foretoken.transfer import send


class FixedCache(RaggedCache):
    """A cache whose numbers of slots and positions are rounded up to a few sizes and never
    shrink."""

    def __init__(self, layers: list[Any], device: torch.device) -> None:
        super().__init__(layers, 0, device)

    @property
    def shape(self) -> tuple[int, ...]:
        """The number of slots, and of positions per slot. Growth replaces the tensors."""
        return self.rows, self.capacity

    @property
    def source_end(self) -> int:
        """The number of source positions to which a forward pass attends; 0: no encoder."""
        return 0

    def reserve(self, rows: int, num_positions: int) -> None:
        """Make room for `rows` slots of `num_positions` positions, both rounded up to a power of
        two (times 64 for positions)."""
        rows = max(self.rows, round_up_to_power_of_two(rows))
        capacity = max(self.capacity, round_up_slots(num_positions))
        if (rows, capacity) != (self.rows, self.capacity):
            self.grow(rows, capacity)

    def lay_out(self, offset: Tensor, width: int, end: int, places: Tensor | None = None) -> None:
        """Set the positions of the next `width` tokens of each slot places[b], after its offset[b]
        cached tokens. The forward pass attends to the first `end` positions. `places`: different
        slots; None: the first ones. Both tensors are on the device, and no shape depends on their
        values."""
        self.offset, self.width, self.end, self.places = offset, width, end, places
        self.max_context = end - width  # for which families compute a relative bias
        row = torch.arange(len(offset), device=self.device) if places is None else places
        self.row = row[:, None]
        self.positions = offset[:, None] + torch.arange(width, device=self.device)


class FixedDecoderCache(FixedCache):
    """The cache of an encoder-decoder's decoder, and of its sources, which have the same slots.

    Attributes:
        cross: The keys and values of the sources. Its lengths are the sources' lengths.
        cross_cache: Both caches, as an argument of the decoder.
        source_lengths: The source's length by slot, on the device, `[slots]`. Forward passes refer
            to this tensor, so only growth replaces it.
    """

    def __init__(
        self,
        layers: list[Any],
        cross_layers: list[Any],
        device: torch.device,
        has_source_mask: bool,
    ) -> None:
        """has_source_mask: True if the decoder takes a mask of its sources, whose number of
        positions may then be rounded up. Otherwise all sources have the same length."""
        super().__init__(layers, device)
        self.cross = FixedCache(cross_layers, device)
        self.cross_cache = FixedCrossCache(self, self.cross)
        self.source_lengths = torch.empty(0)
        self.has_source_mask = has_source_mask
        self._sent: list[int] = []  # what `source_lengths` has

    @property
    def shape(self) -> tuple[int, ...]:
        return *super().shape, self.cross.capacity

    @property
    def source_end(self) -> int:
        longest = max(self.cross.lengths)
        return round_up_slots(longest) if self.has_source_mask else longest

    def join(self, other: CrossCache) -> None:
        super().join(other.decoder)
        self.cross.join(other.cross)

    def select(self, rows: list[int]) -> None:
        super().select(rows)
        self.cross.select(rows)

    def close_gaps(self, lengths: list[int] | None = None) -> None:
        super().close_gaps(lengths)
        self.cross.close_gaps()
        self._send_source_lengths([self.cross.lengths[b] for b in self.order])

    def _send_source_lengths(self, lengths: list[int]) -> None:
        """Write the lengths of the first slots' sources to `source_lengths`, unless it has them
        already. The entries of other slots are not used, but must not be 0: a mask that hides all
        keys gives NaN."""
        if len(self.source_lengths) != self.rows:
            self.source_lengths = torch.ones(self.rows, dtype=torch.long, device=self.device)
            self._sent = []
        if lengths != self._sent:
            self.source_lengths[: len(lengths)] = send(torch.tensor(lengths), self.device)
            self._sent = lengths

    def lay_out(self, offset: Tensor, width: int, end: int, places: Tensor | None = None) -> None:
        super().lay_out(offset, width, end, places)
        for layer in self.cross.list_filled_parts():
            layer.expose(slice(len(offset)) if places is None else places, self.source_end)


class FixedCrossCache(CrossCache):
    """The caches of a `FixedDecoderCache` as an encoder-decoder takes them. All keys and values of
    sources are in the cache before the first forward pass."""

    def __init__(self, decoder: FixedDecoderCache, cross: FixedCache) -> None:
        super().__init__(decoder, cross, [])
        self.fixed = decoder
        self.is_updated = dict.fromkeys(range(len(cross.layers)), True)

    @property
    def source_shape(self) -> tuple[int, int]:
        return len(self.fixed.row), self.fixed.source_end

    def make_source_mask(self) -> Tensor:
        (rows, end), places = self.source_shape, self.fixed.places
        lengths = self.fixed.source_lengths[slice(rows) if places is None else places, None]
        return (torch.arange(end, device=lengths.device) < lengths).long()


def round_up_slots(slots: int) -> int:
    """Return the smallest capacity, 64 times a power of two, with room for this many positions."""
    return CAPACITY_MULTIPLE * round_up_to_power_of_two(-(-slots // CAPACITY_MULTIPLE))
