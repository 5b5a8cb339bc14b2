"""The one module that knows transformers' cache, mask and attention interfaces.

A `RaggedCache` holds rows of different lengths: row b owns slots 0 .. lengths[b]-1, new tokens are
written behind them, and rollback is a smaller length. The stock modelling code runs unchanged over
it, because the causal mask is built from each row's own offset, and so are T5's relative bias and
Bart's positions. `Forward` switches this on for one forward only: in between the model is stock.
It does not know tokens, vocabularies or which positions are scored.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    EncoderDecoderCache,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from foretoken.errors import RefusedError

SUPPORTED = ((5, 20), (6, 0))  # transformers, from and below
BUCKET = 64  # slots; capacity grows by half and up to a multiple of this
KEEPS_TOKENS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # layers that we can replace by ours
KEEPS_NOTHING = {"DummyLayer"}  # layers that read another layer's keys, or none


class RaggedLayer(DynamicLayer):
    """Keys and values of one layer, `[B, heads, capacity, dim]`, the same slots in every layer."""

    keys: Any
    values: Any
    is_sliding = False  # a window is in the mask; all tokens are kept, or a row could not go back

    def fit(self, k: Tensor, v: Tensor, rows: int, capacity: int) -> None:
        """Room for `rows` rows of `capacity` slots of what looks like k and v; content stays."""
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
        self.slots = torch.empty(0)  # [B, width]: where new tokens go, and their positions
        self.view: Any = None  # the keys handed out last
        self.bias: tuple[Tensor, Tensor] | None = None  # a relative bias, and the mask made of it

    def prepare(self, width: int) -> None:
        """Make room for `width` more tokens in every row and lay out where they go."""
        self.width, self.longest = width, max(self.lengths)
        if self.longest + width > self.capacity:
            self.reserve(self.longest + width)
        new = torch.arange(width, device=self.device)
        if min(self.lengths) == self.longest:
            self.offset = self.longest
            self.slots = (new + self.longest).expand(len(self.lengths), -1)
        else:
            self.offset = torch.tensor(self.lengths, device=self.device)
            self.slots = self.offset[:, None] + new
            self.row = torch.arange(len(self.lengths), device=self.device)[:, None]

    def reserve(self, slots: int) -> None:
        if slots > self.capacity:
            slots = max(slots, self.capacity + self.capacity // 2)
            self.capacity = -(-slots // BUCKET) * BUCKET

    def advance(self, tokens: list[int]) -> None:
        """The block's real tokens, per row, now count."""
        self.lengths = [n + t for n, t in zip(self.lengths, tokens, strict=True)]
        self.view = self.bias = None

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
        for layer in self.kept():
            if layer.is_initialized:
                layer.keys, layer.values = layer.keys[index], layer.values[index]
        self.lengths = [self.lengths[b] for b in rows]

    def kept(self) -> list[RaggedLayer]:
        return [layer for layer in self.layers if isinstance(layer, RaggedLayer)]

    # What transformers asks during a forward.

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

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.self_attention_cache.offset

    def mask(self) -> Tensor | None:
        """`[B, S]`, 1 where a source has a token; None where all sources are equally long."""
        if min(self.sources) == max(self.sources):
            return None
        device = self.self_attention_cache.device
        lengths = torch.tensor(self.sources, device=device)
        return (torch.arange(max(self.sources), device=device) < lengths[:, None]).long()

    def join(self, other: CrossCache) -> None:
        """The rows of `other` join behind these; both have seen a forward."""
        self.self_attention_cache.join(other.self_attention_cache)
        width = max(self.sources + other.sources)
        for mine, theirs in zip(self.cross(), other.cross(), strict=True):
            mine.keys = torch.cat([pad_slots(x.keys, width) for x in (mine, theirs)])
            mine.values = torch.cat([pad_slots(x.values, width) for x in (mine, theirs)])
        self.sources = self.sources + other.sources

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was; slots that no source needs any more go."""
        self.self_attention_cache.select(rows)
        self.sources = [self.sources[b] for b in rows]
        width = max(self.sources, default=0)
        index = torch.tensor(rows, dtype=torch.long, device=self.self_attention_cache.device)
        for layer in self.cross():
            layer.keys, layer.values = layer.keys[index, :, :width], layer.values[index, :, :width]

    def cross(self) -> list[Any]:
        return self.cross_attention_cache.layers


def pad_slots(x: Tensor, width: int) -> Tensor:
    return F.pad(x, (0, 0, 0, width - x.shape[2]))


RUNNING: ContextVar[RaggedCache | None] = ContextVar("foretoken_running", default=None)


def ragged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """`[B, 1, q, K]`, True where a query may look: the model's rule at each row's own positions.

    No 2D mask is needed besides: padding stands behind a row's tokens, where causality hides it.
    """
    if not isinstance(q_offset, Tensor):
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **kwargs
        )
    device = kwargs["device"]
    b = torch.arange(batch_size, device=device)[:, None, None, None]
    q = (q_offset[:, None] + torch.arange(q_length, device=device))[:, None, :, None]
    kv = torch.arange(kv_length, device=device)[None, None, None, :]
    mask = mask_function(b, b.new_zeros(1, 1, 1, 1), q, kv)
    return mask.expand(batch_size, -1, q_length, kv_length)


def ragged_eager_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """The same for attention code that adds its mask to the scores."""
    if not isinstance(kwargs.get("q_offset"), Tensor):
        return eager_mask(batch_size, q_length, kv_length, **kwargs)
    mask = ragged_mask(batch_size, q_length, kv_length, **kwargs)
    return additive(mask, torch.zeros((), dtype=kwargs["dtype"], device=kwargs["device"]))


def additive(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def ragged_sdpa(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stock attention, but T5's relative bias as every row sees it."""
    cache = RUNNING.get()
    if position_bias is not None and cache is not None and key is cache.view:
        if isinstance(cache.offset, Tensor):
            attention_mask = shifted(cache, position_bias, attention_mask)
            position_bias = None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, position_bias=position_bias, **kwargs
    )


def shifted(cache: RaggedCache, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Relative bias for `cache.longest` past tokens `[1, H, q, K]` -> the rows' own `[B, H, q, K]`.

    It depends on slot - position only, so a row that is s tokens shorter reads it s slots to the
    right. The mask is added. Layers that share the bias share the result.
    """
    if cache.bias is None or cache.bias[0] is not bias:
        slots = torch.arange(bias.shape[-1], device=bias.device)
        index = slots + (cache.longest - cache.offset)[:, None]  # pyright: ignore
        index = index.clamp(max=bias.shape[-1] - 1)[:, None, None]
        rows = bias.expand(len(cache.lengths), -1, -1, -1)
        rows = rows.gather(-1, index.expand(-1, bias.shape[1], bias.shape[2], -1))
        cache.bias = bias, additive(mask, rows)
    return cache.bias[1]


def ragged_eager(module: torch.nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The attention function of the model's own file, for what sdpa cannot do (softcap, sinks)."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


AttentionInterface.register("ragged_sdpa", ragged_sdpa)
AttentionInterface.register("ragged_eager", ragged_eager)
AttentionMaskInterface.register("ragged_sdpa", ragged_mask)
AttentionMaskInterface.register("ragged_eager", ragged_eager_mask)


class Forward:
    """Switches a model to ragged attention, for the length of a `with` over one forward."""

    def __init__(self, model: PreTrainedModel) -> None:
        parts = [m for m in model.modules() if isinstance(m, PreTrainedModel)]
        self.configs = list({id(part.config): part.config for part in parts}.values())
        self.name = "ragged_sdpa" if model._supports_sdpa else "ragged_eager"
        decoder = model.get_decoder() if model.config.is_encoder_decoder else None
        self.positions = getattr(decoder, "embed_positions", None)

    @contextmanager
    def __call__(self, cache: RaggedCache) -> Iterator[None]:
        stock = [config._attn_implementation_internal for config in self.configs]
        with ExitStack() as stack:
            if self.positions is not None:
                hook = self.positions.register_forward_hook(own_positions)
                stack.callback(hook.remove)
            token = RUNNING.set(cache)
            stack.callback(RUNNING.reset, token)
            for config in self.configs:
                config._attn_implementation_internal = self.name
            try:
                yield
            finally:
                for config, name in zip(self.configs, stock, strict=True):
                    config._attn_implementation_internal = name


def own_positions(module: torch.nn.Module, args: Any, output: Tensor) -> Tensor:
    """Embeddings of each row's own positions, for decoders that count from the longest row."""
    cache = RUNNING.get()
    assert cache is not None
    slots = cache.slots + getattr(module, "offset", 0)
    weight: Any = module.weight
    return F.embedding(slots.clamp(max=weight.shape[0] - 1), weight).to(output.dtype)


def ragged_cache(model: PreTrainedModel, rows: int) -> RaggedCache:
    """An empty cache for `rows` rows of this model."""
    stock = DynamicCache(config=model.config).layers
    layers = [RaggedLayer() if type(x).__name__ in KEEPS_TOKENS else x for x in stock]
    return RaggedCache(layers, rows, model.device)


def admit(model: PreTrainedModel) -> None:
    """Raise RefusedError for what cannot roll back row by row, by name and reason."""
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
    if not model.can_generate():
        return "it has no head that generates text; load its ForCausalLM class"
    if getattr(model, "_is_stateful", False):
        return "it keeps a recurrent state, which cannot go back to before a rejected token"
    if not model._can_set_attn_implementation():
        return "its attention is outside transformers' attention interface (ALiBi and older models)"
    names = {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
    other = sorted(names - KEEPS_TOKENS - KEEPS_NOTHING)
    if other:
        return f"its cache layers ({', '.join(other)}) keep a state that is not per token"
    return None
