"""Keys and values of rows of different lengths, as a transformers cache.

Row b of a `RaggedCache` owns slots 0 .. lengths[b]-1 of every layer; new tokens are written behind
them, and rollback is a smaller length: what stands behind it is hidden and written over later. It
does not know tokens, vocabularies or which positions are scored.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from foretoken.errors import RefusedError
from foretoken.models.base import Tree
from foretoken.transfer import sent

SUPPORTED = ((5, 20), (6, 0))  # transformers, from and below
BUCKET = 64  # slots; capacity grows by half and up to a multiple of this
KEEPS_TOKENS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # layers that RaggedLayer replaces
KEEPS_NOTHING = {"DummyLayer"}  # layers that read another layer's keys, or none


class RaggedLayer(DynamicLayer):
    """Keys and values of one layer, `[B, heads, capacity, dim]`, the same slots in every layer."""

    keys: Any
    values: Any
    is_sliding = False  # a window is in the mask; all tokens are kept, or a row could not go back

    def fit(self, k: Tensor, v: Tensor, rows: int, capacity: int) -> None:
        """Make room for `rows` rows of `capacity` slots, shaped like k and v; content stays."""
        if self.is_initialized and self.keys.shape[0] == rows and self.keys.shape[2] >= capacity:
            return
        old = (self.keys, self.values) if self.is_initialized else None
        # Zeros: what a mask hides is still multiplied by zero, and NaN would survive that.
        self.keys = k.new_zeros(rows, k.shape[1], capacity, k.shape[3])
        self.values = v.new_zeros(rows, v.shape[1], capacity, v.shape[3])
        self.is_initialized = True
        if old is not None:
            self.place(0, *old)

    def place(self, row: int, k: Tensor, v: Tensor) -> None:
        """Copy whole rows in, from slot 0."""
        self.keys[row : row + k.shape[0], :, : k.shape[2]] = k
        self.values[row : row + v.shape[0], :, : v.shape[2]] = v


class RaggedCache(DynamicCache):
    """Rows with their own lengths. `prepare` before a forward, `advance` behind it."""

    def __init__(self, layers: list[Any], rows: int, device: torch.device) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.layers = layers
        self.lengths = [0] * rows
        self.device = device
        self.capacity = 0
        self.longest = 0
        self.width = 0  # of the running forward's block, padding included
        self.offset: int | Tensor = 0  # first new slot: one number where rows are even, else [B]
        self.slots = torch.empty(0)  # [B, width]: where new tokens go
        self.positions = self.slots  # [B, width]: the slots, except in a tree
        self.tree: Tree | None = None  # of the running forward
        self.view: Any = None  # the keys handed out last
        self.made: dict[int, tuple[Tensor, Tensor]] = {}  # what `once` made in this forward

    @property
    def decoder(self) -> RaggedCache:
        """Of a decoder-only model this is the whole cache."""
        return self

    def prepare(self, width: int, tree: Tree | None = None) -> None:
        """Make room for `width` more tokens in every row and lay out where they go."""
        self.width, self.longest = width, max(self.lengths)
        if self.longest + width > self.capacity:
            self.reserve(self.longest + width)
        if tree is None and min(self.lengths) == self.longest:
            self.offset, end = self.longest, self.longest + width
            new = torch.arange(self.longest, end, device=self.device)
            self.slots = new.expand(len(self.lengths), -1)
        else:
            self.offset = sent(torch.tensor(self.lengths), self.device)
            self.slots = self.offset[:, None] + torch.arange(width, device=self.device)
            self.row = torch.arange(len(self.lengths), device=self.device)[:, None]
        self.tree, self.positions = tree, self.slots
        if tree is not None:
            self.tree = Tree(sent(tree.depths, self.device), sent(tree.seen, self.device))
            self.positions = self.tree.depths.gather(1, self.slots)

    def reserve(self, slots: int) -> None:
        if slots > self.capacity:
            slots = max(slots, self.capacity + self.capacity // 2)
            self.capacity = -(-slots // BUCKET) * BUCKET

    def advance(self, tokens: list[int]) -> None:
        """From now on each row holds this many of the block's tokens."""
        self.lengths = [n + t for n, t in zip(self.lengths, tokens, strict=True)]
        self.view = None
        self.made.clear()

    def once(self, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, once per `source` and forward: layers are given the same masks and biases."""
        if id(source) not in self.made:
            self.made[id(source)] = source, make()
        return self.made[id(source)][1]

    def join(self, other: RaggedCache) -> None:
        """The rows of `other` join behind these."""
        rows, total = len(self.lengths), len(self.lengths) + len(other.lengths)
        self.reserve(other.capacity)
        for mine, theirs in zip(self.kept(), other.kept(), strict=True):
            if theirs.is_initialized:
                mine.fit(theirs.keys, theirs.values, total, self.capacity)
                mine.place(rows, theirs.keys, theirs.values)
            elif mine.is_initialized:
                mine.fit(mine.keys, mine.values, total, self.capacity)
        self.lengths = self.lengths + other.lengths

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was."""
        index = torch.tensor(rows, dtype=torch.long, device=self.device)
        for layer in self.filled():
            layer.keys, layer.values = layer.keys[index], layer.values[index]
        self.lengths = [self.lengths[b] for b in rows]

    def keep(self, slots: list[list[int]]) -> None:
        """Row b keeps these of its slots, which ascend, and closes the gaps."""
        self.lengths = [len(row) for row in slots]
        start, end = min(map(unmoved, slots), default=0), max(self.lengths, default=0)
        if start >= end:
            return
        index = torch.tensor([[*row, *range(len(row), end)][start:] for row in slots])
        index = sent(index, self.device)
        row = torch.arange(len(slots), device=self.device)[:, None]
        for layer in self.filled():
            for x in (layer.keys, layer.values):
                x[:, :, start:end] = x[row, :, index].transpose(1, 2)

    def kept(self) -> list[RaggedLayer]:
        """The layers that keep tokens."""
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    def filled(self) -> list[RaggedLayer]:
        return [layer for layer in self.kept() if layer.is_initialized]

    # What transformers calls during a forward.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        layer, end = self.layers[layer_idx], self.longest + self.width
        if not isinstance(layer, RaggedLayer):
            return layer.update(key_states, value_states, *args, **kwargs)
        layer.fit(key_states, value_states, len(self.lengths), self.capacity)
        if isinstance(self.offset, int):
            layer.keys[:, :, self.offset : end] = key_states
            layer.values[:, :, self.offset : end] = value_states
        else:
            layer.keys[self.row, :, self.slots] = key_states.transpose(1, 2)
            layer.values[self.row, :, self.slots] = value_states.transpose(1, 2)
        self.view = layer.keys[:, :, :end]
        return self.view, layer.values[:, :, :end]

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.longest + query_length, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.offset

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.longest


class CrossCache(EncoderDecoderCache):
    """A ragged cache and, behind it, the encoder's keys and values: one padded row per source."""

    self_attention_cache: RaggedCache
    cross_attention_cache: DynamicCache

    def __init__(self, ragged: RaggedCache, sources: list[int]) -> None:
        super().__init__(ragged, DynamicCache())
        self.sources = sources  # tokens of each row's source
        self.states: Tensor | None = None  # the encoder's, until their keys and values are cached

    @property
    def decoder(self) -> RaggedCache:
        return self.self_attention_cache

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.decoder.offset

    def mask(self) -> Tensor | None:
        """`[B, S]`, 1 where a source has a token; None where all sources are equally long."""
        if min(self.sources) == max(self.sources):
            return None
        device = self.decoder.device
        lengths = sent(torch.tensor(self.sources), device)
        return (torch.arange(max(self.sources), device=device) < lengths[:, None]).long()

    def join(self, other: CrossCache) -> None:
        """The rows of `other` join behind these; both have been through a forward."""
        self.decoder.join(other.decoder)
        width = max(self.sources + other.sources)
        for mine, theirs in zip(self.cross(), other.cross(), strict=True):
            mine.keys = torch.cat([pad_slots(x.keys, width) for x in (mine, theirs)])
            mine.values = torch.cat([pad_slots(x.values, width) for x in (mine, theirs)])
        self.sources = self.sources + other.sources

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was; slots that no source needs any more go."""
        self.decoder.select(rows)
        self.sources = [self.sources[b] for b in rows]
        width = max(self.sources, default=0)
        index = torch.tensor(rows, dtype=torch.long, device=self.decoder.device)
        for layer in self.cross():
            layer.keys, layer.values = layer.keys[index, :, :width], layer.values[index, :, :width]

    def cross(self) -> list[Any]:
        return self.cross_attention_cache.layers


def unmoved(slots: list[int]) -> int:
    """How many of the first slots stay where they are."""
    return next((i for i, slot in enumerate(slots) if slot != i), len(slots))


def pad_slots(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, 0, 0, width - x.shape[2]))


def growing_cache(layers: int) -> Any:
    """transformers' own DynamicCache, of layers that only append."""
    cache: Any = DynamicCache()
    cache.layer_class_to_replicate = None
    cache.layers = [DynamicLayer() for _ in range(layers)]
    return cache


def ragged_cache(model: PreTrainedModel, rows: int) -> RaggedCache:
    """An empty cache for `rows` rows of this model."""
    stock = DynamicCache(config=model.config).layers
    layers = [RaggedLayer() if type(x).__name__ in KEEPS_TOKENS else x for x in stock]
    for name in ("num_decoder_layers", "decoder_layers"):  # the stock ones are the encoder's
        if model.config.is_encoder_decoder and getattr(model.config, name, None):
            layers = [RaggedLayer() for _ in range(getattr(model.config, name))]
    return RaggedCache(layers, rows, model.device)


def admit(model: PreTrainedModel) -> None:
    """Raise RefusedError, with a reason, for a model that cannot be rolled back row by row."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not SUPPORTED[0] <= version < SUPPORTED[1]:
        raise RefusedError(
            f"transformers {transformers.__version__}: the cache needs transformers>=5.20,<6"
        )
    reason = objection(model)
    if reason:
        name = f"{model.config.model_type} ({type(model).__name__})"
        raise RefusedError(f"{name} cannot be run exactly: {reason}")


def objection(model: PreTrainedModel) -> str | None:
    """Why this model's rows could not be rolled back one by one, or None."""
    if model.main_input_name != "input_ids":
        return f"it reads {model.main_input_name}, not text"
    if not model.can_generate():
        return "it has no head that generates text; load its ForCausalLM class"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot go back to before a rejected token"
    if not model._can_set_attn_implementation():
        return "its attention is outside transformers' attention interface (ALiBi and older models)"
    names = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    stateful = sorted(names - KEEPS_TOKENS - KEEPS_NOTHING)
    if stateful:
        return f"its cache layers ({', '.join(stateful)}) keep a state that is not per token"
    return None
