"""Keys and values of a ragged cache, for a draft that reads them and keeps none."""

from __future__ import annotations

from transformers import PreTrainedConfig

from foretoken.models.base import LentKeys
from foretoken.models.stock.cache import RaggedCache


def lenders(config: PreTrainedConfig) -> dict[str, int]:
    """The last layer of each kind among those that keep keys: the last layers may read others'."""
    kinds: list[str] = getattr(config, "layer_types", None) or []
    keeping = len(kinds) - (getattr(config, "num_kv_shared_layers", None) or 0)
    return {kind: j for j, kind in enumerate(kinds[:keeping])}


def rows_of(cache: RaggedCache, layer: int, rows: list[int], first: int) -> LentKeys:
    """A layer's slots from `first` up to the longest of these rows. Only rows that do not stand in
    the first places, in their order, are copied."""
    end = max(cache.lengths[b] for b in rows)
    places = [cache.places[b] for b in rows]
    if places == list(range(len(places))):
        return LentKeys(*(x[: len(places), :, first:end] for x in cache.layers[layer].arrays))
    return LentKeys(*(x[places, :, first:end] for x in cache.layers[layer].arrays))
