"""A transformers cache for a batch of sequences of different lengths.

Each sequence has one slot, which is the same in the arrays of every layer. New tokens are written
after the sequence's cached tokens. A rollback only lowers the sequence's length: entries beyond the
length are masked, and the next tokens overwrite these entries. The cache does not depend on token
ids, on the vocabulary, or on which positions need logits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from inspect import signature
from typing import Any

import torch
import transformers
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from foretoken.errors import RefusedError, log_error_kind
from foretoken.models.base import SharedKV
from foretoken.models.hidden_states import HiddenStateStore
from foretoken.models.rewindable_states import PendingCursor, RecurrentStateLayer, RewindableRows
from foretoken.models.row_slots import (
    RowSlots,
    add_spare_rows,
    count_needed_slots,
    order_by_slot,
)
from foretoken.models.stock.positions import POSITION_IDS_METHOD, counts_own_positions
from foretoken.transfer import send

SUPPORTED_TRANSFORMERS = ((5, 20), (6, 0))  # from the first version, below the second
CAPACITY_MULTIPLE = RowSlots.unit
TOKEN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # layers that RaggedLayer replaces
# A family with its own attention code is supported if it has one of these attention implementations
MASKED_ATTENTIONS = {None, "eager", "sdpa"}
# Cache layers with recurrent states, and layers that have keys and values too
STATE_LAYERS = {"LinearAttentionLayer"}
HYBRID_LAYERS = {
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
EMPTY_LAYERS = {"DummyLayer"}  # layers without a cache; some use another layer's cache
# Families that represent an image neither by prompt tokens nor by an encoder's hidden states
UNSUPPORTED_MODEL_TYPES = {"git", "mllama", "pp_formulanet", "udop"}
ALTERNATIVES_HINT = (
    "use transformers' own generate for such a model, or use another model as the draft"
)
KeysValues = tuple[Tensor, Tensor]  # keys and values


class RaggedLayer(DynamicLayer):
    """The keys and values of one layer: `arrays`, each `[slots, heads, capacity, dim]`, with the
    same slots and capacity in every layer. `keys` and `values` are views of the arrays for the
    current forward pass."""

    arrays: KeysValues
    keys: Any
    values: Any
    # False even with a window, which the mask applies: rollbacks need all tokens in the cache
    is_sliding = False

    def resize(self, like: KeysValues, rows: int, capacity: int, used: int) -> None:
        """Allocate arrays for `rows` slots, with the heads and dim of `like`, and copy the first
        `used` slots. The other slots stay uninitialized, so that only used slots take memory."""
        k, v = (x.new_empty(rows, x.shape[1], capacity, x.shape[3]) for x in like)
        old = self.arrays if self.is_initialized else (k[:, :, :0], v[:, :, :0])
        for x, was in zip((k, v), old, strict=True):
            fill_slots(x[:used], was[:used, :, :capacity])
        self.arrays, self.is_initialized = (k, v), True

    def put(self, place: int, row: KeysValues) -> None:
        """Store a sequence's keys and values `[heads, n, dim]` in a slot."""
        for x, new in zip(self.arrays, row, strict=True):
            fill_slots(x[place], new)

    def get_row(self, place: int, slots: int) -> KeysValues:
        k, v = self.arrays
        return k[place, :, :slots], v[place, :, :slots]

    def expose(self, rows: slice | Tensor, slots: int) -> KeysValues:
        """Set `keys` and `values` to these slots and to the first `slots` positions. They are
        copies if `rows` is a tensor."""
        self.keys, self.values = (x[rows, :, :slots] for x in self.arrays)
        return self.keys, self.values


class RaggedCache(RewindableRows, DynamicCache):
    """The KV cache of a decoder, for sequences of different lengths. Call `prepare` before a
    forward pass and `advance` after it. In a forward pass the sequences are in the order of their
    slots; `order` has the row of each slot."""

    def __init__(
        self,
        layers: list[Any],
        rows: int,
        device: torch.device,
        states: dict[int, RecurrentStateLayer] | None = None,
    ) -> None:
        super().__init__()
        self.layer_class_to_replicate = None
        self.layers = layers
        self.states = states or {}  # by layer
        self.base_lengths = [0] * rows  # tokens in each sequence's recurrent base state
        self.cursor: Any = None  # PendingCursor of the current forward pass
        self.current_layer = -1  # the layer that last called `get_recurrent_state`
        # recurrences and scans that this layer has run in this forward pass
        self.recurrence_calls = 0
        self.lengths = [0] * rows
        self.long = [False] * rows  # by sequence: True if it uses the long rotary factors
        # by sequence: added to the positions of tokens after the media
        self.position_shift = [0] * rows
        self.shown = HiddenStateStore(rows)
        self.slots = list(range(rows))
        self.order = self.slots  # the row in each slot, after `close_gaps`
        self.device = device
        # Allocated slots. Spare slots cost nothing on a CPU, since untouched memory is not resident
        self.rows = add_spare_rows(rows) if device.type == "cpu" else rows
        self.capacity = 0  # positions per slot
        self.max_context = 0  # cached tokens of the longest sequence
        self.width = 0  # tokens of the current forward pass's blocks, padding included
        self.end = 0  # number of cached and new positions in the current forward pass
        # position of each slot's first new token, [B]; an int if all positions are equal
        self.offset: int | Tensor = 0
        self.positions = torch.empty(0)  # [B, width]: positions of the new tokens
        # slots of the current forward pass, [B]; None: the first ones
        self.places: Tensor | None = None
        self.last_keys: Any = None  # the keys that `update` returned last
        # Results of `compute_once` in this forward pass, by id of the source
        self.masks_by_source: dict[int, tuple[Tensor, Tensor]] = {}
        self.encoder_mask: Tensor | None = None  # [B, S], 0 at padding of the encoder's states

    @property
    def decoder(self) -> RaggedCache:
        """The decoder's cache; for a decoder-only model, the whole cache."""
        return self

    def prepare(self, width: int, counts: list[int] | None = None) -> None:
        """Make room for `width` new tokens in every sequence, and compute the new tokens'
        positions. counts: the number of tokens of each block without padding; None: `width`."""
        self.close_gaps()
        lengths = [self.lengths[b] for b in self.order]
        self.width, self.max_context = width, max(lengths)
        self.end = self.max_context + width
        self.reserve(len(lengths), self.end)
        self.trim(len(lengths), self.end)
        if self.states:
            pending = self.advance_bases(self.order, self.lengths, counts or [width] * len(lengths))
            self.cursor = PendingCursor(pending, width, self.device)
        if min(lengths) == self.max_context:
            self.offset = self.max_context
            new = torch.arange(self.max_context, self.end, device=self.device)
            self.positions = new.expand(len(lengths), -1)
        else:
            self.offset = send(torch.tensor(lengths), self.device)
            self.positions = self.offset[:, None] + torch.arange(width, device=self.device)
            self.row = torch.arange(len(lengths), device=self.device)[:, None]

    def list_state_layers(self) -> list[RecurrentStateLayer]:
        return [layer for layer in self.states.values() if layer.is_initialized]

    def advance(self, tokens: list[int]) -> None:
        """Add tokens[b] new tokens to the length of each sequence b."""
        self.lengths = [n + t for n, t in zip(self.lengths, tokens, strict=True)]
        self.last_keys = None
        self.masks_by_source.clear()

    def compute_once(self, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """Return the result of `make`, which is called only once for each `source` in a forward
        pass. All layers share the mask or bias that `make` returns."""
        if id(source) not in self.masks_by_source:
            self.masks_by_source[id(source)] = source, make()
        return self.masks_by_source[id(source)][1]

    def to_slot_order(self, x: Tensor) -> Tensor:
        """Return `x`, `[B, ...]` in row order, reordered to the order of slots."""
        if self.order == list(range(len(self.order))):
            return x
        return x[send(torch.tensor(self.order), x.device)]

    def join(self, other: Any) -> None:
        super().join(other)
        self.long = self.long + other.long
        self.position_shift = self.position_shift + other.position_shift
        self.shown.join(other.shown)

    def select(self, rows: list[int]) -> None:
        self.long = [self.long[b] for b in rows]
        self.position_shift = [self.position_shift[b] for b in rows]
        self.shown.select(rows)
        super().select(rows)

    def close_gaps(self, lengths: list[int] | None = None) -> None:
        super().close_gaps(lengths)
        self.order = order_by_slot(self.slots)

    def get_shared_kv(self, layer: int, rows: list[int], first: int) -> SharedKV:
        """Return a layer's keys and values for these sequences, from position `first` to the end of
        the longest sequence. They are views if the sequences have the first slots, in order;
        otherwise they are copies."""
        end, places = max(self.lengths[b] for b in rows), [self.slots[b] for b in rows]
        index = slice(len(places)) if places == list(range(len(places))) else places
        return SharedKV(*(x[index, :, first:end] for x in self.layers[layer].arrays))

    @property
    def slot_bytes(self) -> int:
        """Bytes of one token's keys and values in all layers."""
        ragged = [layer for layer in self.list_filled_parts() if isinstance(layer, RaggedLayer)]
        arrays = [x for layer in ragged for x in layer.arrays]
        return sum(x.shape[1] * x.shape[3] * x.itemsize for x in arrays)

    @property
    def state_bytes(self) -> int:
        """Bytes of one sequence's recurrent states in all layers."""
        arrays = [x for layer in self.states.values() for x in layer.arrays.values()]
        return sum(x[0].numel() * x.itemsize for x in arrays)

    def list_parts(self) -> list[Any]:
        """Return the layers with keys and values, then the layers with recurrent states."""
        ragged = [layer for layer in self.layers if isinstance(layer, RaggedLayer)]
        return [*ragged, *self.states.values()]

    # Methods that transformers calls during a forward pass

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysValues:
        layer, new = self.layers[layer_idx], (key_states, value_states)
        if not isinstance(layer, RaggedLayer):
            return layer.update(*new, *args, **kwargs)
        if not layer.is_initialized:
            layer.resize(new, self.rows, self.capacity, count_needed_slots(self.slots))
        for x, states in zip(layer.arrays, new, strict=True):
            if isinstance(self.offset, int):
                x[: len(states), :, self.offset : self.end] = states
            else:
                x[self.row, :, self.positions] = states.transpose(1, 2)
        rows = slice(len(key_states)) if self.places is None else self.places
        self.last_keys, values = layer.expose(rows, self.end)
        return self.last_keys, values

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.end, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.offset

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end - self.width

    # Methods that transformers' layers with recurrent states call, and our recurrences

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """Return None, so that a family runs its code for blocks even for a single token."""

    def get_recurrent_state(self, layer_idx: int, state_idx: int = 0) -> None:
        self.current_layer, self.recurrence_calls = layer_idx, 0

    def has_previous_state(
        self, layer_idx: int | None = None, state_idx: int | None = None
    ) -> bool:
        return False

    def is_recording_past(self, layer_idx: int | None = None) -> bool:
        return True

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, state_idx: int = 0, **kwargs: Any
    ) -> Tensor:
        size, states = kwargs["conv_kernel_size"], self.states[layer_idx]
        return states.extend_window(str(state_idx), conv_states, size, self.cursor, self.rows)

    def update_recurrent_state(self, recurrent_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Store nothing, since our recurrence has stored the state already. Raises RefusedError if
        the layer has run none of our recurrences: the layer's own recurrence would start each block
        from an empty state."""
        if not self.recurrence_calls:
            raise RefusedError(
                "a layer computes its recurrent states by an unknown function, which would start "
                f"each block from an empty state; {ALTERNATIVES_HINT}"
            )
        return recurrent_states

    def advance_recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None
    ) -> Tensor:
        """Run `RecurrentStateLayer.advance_recurrence` for the current layer."""
        self.recurrence_calls += 1
        return self.states[self.current_layer].advance_recurrence(
            q, k, v, g, beta, self.cursor, self.rows
        )

    def advance_scan(self, q: Tensor, k: Tensor, u: Tensor, t: Tensor, A: Tensor) -> Tensor:
        """Run `RecurrentStateLayer.advance_scan` for the current layer's next selective scan."""
        self.recurrence_calls += 1
        return self.states[self.current_layer].advance_scan(
            q, k, u, t, A, self.recurrence_calls - 1, self.cursor, self.rows
        )


class CrossCache(EncoderDecoderCache):
    """The cache of an encoder-decoder: a cache of the decoder's keys and values, and a cache of the
    keys and values of the encoder's output. In the second cache, a sequence's length is the length
    of its source. A sequence has the same slot in both caches."""

    self_attention_cache: RaggedCache
    cross_attention_cache: RaggedCache

    def __init__(self, ragged: RaggedCache, cross: RaggedCache, sources: list[int]) -> None:
        super().__init__(ragged, cross)
        cross.lengths = sources  # encoder tokens of each sequence
        # The encoder's hidden states, until the first forward pass caches their keys and values
        self.states: Tensor | None = None

    @property
    def decoder(self) -> RaggedCache:
        return self.self_attention_cache

    @property
    def cross(self) -> RaggedCache:
        return self.cross_attention_cache

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.decoder.offset

    def prepare(self, width: int, counts: list[int] | None = None) -> None:
        """Prepare both caches for `width` more tokens. The sources' keys and values are written by
        the first forward pass."""
        self.decoder.prepare(width, counts)
        self.cross.prepare(0)
        self.cross.offset = 0
        for layer in self.cross.list_filled_parts():
            layer.expose(slice(len(self.cross.lengths)), self.cross.end)

    @property
    def source_shape(self) -> tuple[int, int]:
        """The number of sequences, and of source positions to which a forward pass attends."""
        return len(self.cross.lengths), max(self.cross.lengths)

    def make_source_mask(self) -> Tensor | None:
        """Return a mask `[B, S]` in slot order, with 0 at the padding of sources; None if no source
        is padded."""
        sources, device = self.cross.lengths, self.decoder.device
        if min(sources) == max(sources):
            return None
        lengths = self.cross.to_slot_order(send(torch.tensor(sources), device))
        return (torch.arange(max(sources), device=device) < lengths[:, None]).long()

    def join(self, other: CrossCache) -> None:
        """Append the sequences of `other`. A forward pass must have run over this cache and over
        `other`."""
        self.decoder.join(other.decoder)
        self.cross.join(other.cross)

    def select(self, rows: list[int]) -> None:
        """Replace sequence b by the former sequence rows[b]."""
        self.decoder.select(rows)
        self.cross.select(rows)


def fill_slots(x: Tensor, new: Tensor) -> None:
    """Copy `new` to the first positions of `x` and set the other positions to 0. Attention
    multiplies masked values by 0, and 0 times a NaN that an earlier sequence left there would be
    NaN."""
    slots = new.shape[-2]
    x[..., :slots, :] = new
    x[..., slots:, :] = 0


def make_cache_argument(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """Return the cache as a keyword argument for the model's forward."""
    return {_find_cache_parameter(type(model)): cache}


@lru_cache
def _find_cache_parameter(model_class: type[PreTrainedModel]) -> str:
    """Return the name of the forward's parameter for the cache. transformers 5.24 renamed this
    parameter; custom code may still have the old name, or have no such parameter."""
    for each in model_class.__mro__:
        named = signature(each.forward).parameters if "forward" in vars(each) else {}
        for name in ("past_key_values", "cache", "cache_params"):
            if name in named:
                return name
    return "past_key_values"


def make_ragged_cache(model: PreTrainedModel, rows: int) -> RaggedCache:
    """Return an empty cache for `rows` sequences of this model."""
    stock = DynamicCache(config=model.config).layers
    names = [type(x).__name__ for x in stock]
    with_tokens = TOKEN_LAYERS | HYBRID_LAYERS
    layers = [RaggedLayer() if n in with_tokens else x for n, x in zip(names, stock, strict=True)]
    states = {
        i: RecurrentStateLayer() for i, n in enumerate(names) if n in STATE_LAYERS | HYBRID_LAYERS
    }
    # For an encoder-decoder, DynamicCache may count the encoder's layers
    for name in ("num_decoder_layers", "decoder_layers", "decoder_num_hidden_layers"):
        if model.config.is_encoder_decoder and getattr(model.config, name, None):
            layers = [RaggedLayer() for _ in range(getattr(model.config, name))]
    return RaggedCache(layers, rows, model.device, states)


def admit(model: PreTrainedModel, *, states: bool = False) -> None:
    """Raise RefusedError, with the reason, for a model whose sequences cannot be rolled back
    independently of each other. states: True if the caller's backend can roll back recurrent
    states."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not SUPPORTED_TRANSFORMERS[0] <= version < SUPPORTED_TRANSFORMERS[1]:
        raise RefusedError(
            f"transformers {transformers.__version__} is not supported; install "
            "transformers>=5.20,<6"
        )
    reason, name = (
        find_rollback_objection(model),
        f"{model.config.model_type} ({type(model).__name__})",
    )
    if reason:
        raise RefusedError(f"{name} cannot be run exactly: {reason}; {ALTERNATIVES_HINT}")
    if not states and keeps_states(model):
        raise RefusedError(
            f"{name} has recurrent states, which this backend cannot roll back; use "
            "runtime='transformers'"
        )


def find_generation_objection(model: PreTrainedModel) -> str | None:
    """Return why this model cannot generate tokens from ids in the way that the model was trained
    for; None if it can."""
    if model.main_input_name != "input_ids" and not model.config.is_encoder_decoder:
        return f"its input is {model.main_input_name}, not token ids"
    if not model.can_generate():
        return "it has no language model head; load its ForCausalLM class"
    if model.config.is_encoder_decoder:
        return None
    if getattr(model.config, "is_decoder", True) is False and _is_bidirectional(model):
        return "its config sets is_decoder to false, to fill in masked tokens; set it to true"
    if _counts_from_padding(model):
        return (
            "its own code counts positions from the padding id, as in RoBERTa, but transformers' "
            "generate counts positions from 0, for which the model was not trained"
        )
    if _hashes_at_random(model.config):
        return (
            "its attention hashes with random numbers, so its output changes from call to call; "
            "set hash_seed and num_buckets in its config"
        )
    return None


def _is_bidirectional(model: PreTrainedModel) -> bool:
    """Return whether none of the model's attention layers is causal (BERT)."""
    return not any(getattr(part, "is_causal", False) for part in model.modules())


def _counts_from_padding(model: PreTrainedModel) -> bool:
    counts = any(hasattr(part, POSITION_IDS_METHOD) for part in model.modules())
    return counts and not counts_own_positions(model)


def has_own_attention(part: Any) -> bool:
    """Return whether the layers of a model have their own attention code instead of transformers'
    AttentionInterface (ALiBi and older models)."""
    return isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation()


def _hashes_at_random(config: Any) -> bool:
    """Return whether LSH attention (Reformer) draws new hashes in each forward pass."""
    settings = [getattr(config, name, None) for name in ("hash_seed", "num_buckets")]
    return "lsh" in (getattr(config, "attn_layers", None) or ()) and None in settings


def find_rollback_objection(model: PreTrainedModel) -> str | None:
    """Return why this model's sequences cannot be rolled back independently of each other; None if
    they can."""
    reason = find_generation_objection(model)
    if reason:
        return reason
    if model.config.model_type in UNSUPPORTED_MODEL_TYPES:
        return "it represents an image neither by prompt tokens nor by an encoder's hidden states"
    if getattr(model.config, "attention_type", "") == "block_sparse":
        return "its block-sparse attention depends on the block length; set attention_type"
    own: list[Any] = [part for part in model.modules() if has_own_attention(part)]
    kinds = {part.config._attn_implementation for part in own}
    if kinds - MASKED_ATTENTIONS:
        named = ", ".join(sorted(map(str, kinds - MASKED_ATTENTIONS)))
        return f"its own code takes no masks with {named}; set attn_implementation to 'eager'"
    try:
        names = _list_cache_layers(model)
    except Exception as error:  # the config lacks a field that DynamicCache needs
        kind = log_error_kind(error)
        return f"transformers cannot make a cache from its config ({kind})"
    unknown = sorted(names - TOKEN_LAYERS - EMPTY_LAYERS - STATE_LAYERS - HYBRID_LAYERS)
    if unknown:
        return f"its cache layers ({', '.join(unknown)}) do not have one entry per token"
    return None


def keeps_states(model: PreTrainedModel) -> bool:
    """Return whether the model has recurrent states, with or without keys and values."""
    stateful = bool(_list_cache_layers(model) & (STATE_LAYERS | HYBRID_LAYERS))
    return stateful or getattr(model, "_is_stateful", False)


def _list_cache_layers(model: PreTrainedModel) -> set[str]:
    return {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
