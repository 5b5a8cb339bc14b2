"""Keys and values of rows of different lengths, as a transformers cache.

A row has the same place in every layer's arrays; new tokens are written behind its own, and
rollback is a smaller length: what stands behind it is hidden and written over later. It does not
know tokens, vocabularies or which positions are scored.
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
from foretoken.models.row_slots import RowSlots, add_spare_rows, order_by_slot
from foretoken.models.stock.positions import POSITION_IDS_METHOD, counts_own_positions
from foretoken.transfer import send

SUPPORTED_TRANSFORMERS = ((5, 20), (6, 0))  # transformers, from and below
CAPACITY_MULTIPLE = RowSlots.unit
TOKEN_LAYERS = {"DynamicLayer", "DynamicSlidingWindowLayer"}  # layers that RaggedLayer replaces
MASKED_ATTENTIONS = {
    None,
    "eager",
    "sdpa",
}  # kinds of attention whose masks we make for a family's own code
# Layers that keep a state, and those that keep tokens beside it
STATE_LAYERS = {"LinearAttentionLayer"}
HYBRID_LAYERS = {
    "LinearAttentionAndFullAttentionLayer",
    "LinearAttentionAndSlidingWindowAttentionLayer",
}
EMPTY_LAYERS = {"DummyLayer"}  # layers that read another layer's keys, or none
# Families that make more of a picture than a text's tokens, or an encoder's states
UNSUPPORTED_MODEL_TYPES = {"git", "mllama", "pp_formulanet", "udop"}
ALTERNATIVES_HINT = "use transformers' own generate for such a model, or draft with another"
KeysValues = tuple[Tensor, Tensor]  # keys and values


class RaggedLayer(DynamicLayer):
    """Keys and values of one layer: `arrays`, `[rows, heads, capacity, dim]`, with the same places
    and slots in every layer. `keys` and `values` are what a forward sees of them."""

    arrays: KeysValues
    keys: Any
    values: Any
    is_sliding = False  # a window is in the mask; all tokens are kept, or a row could not go back

    def resize(self, like: KeysValues, rows: int, capacity: int, used: int) -> None:
        """New arrays, shaped like these. The first `used` places stay; others may hold anything, so
        that memory is touched only when a row takes it."""
        k, v = (x.new_empty(rows, x.shape[1], capacity, x.shape[3]) for x in like)
        old = self.arrays if self.is_initialized else (k[:, :, :0], v[:, :, :0])
        for x, was in zip((k, v), old, strict=True):
            fill_slots(x[:used], was[:used, :, :capacity])
        self.arrays, self.is_initialized = (k, v), True

    def put(self, place: int, row: KeysValues) -> None:
        """A row `[heads, n, dim]` takes this place."""
        for x, new in zip(self.arrays, row, strict=True):
            fill_slots(x[place], new)

    def row(self, place: int, slots: int) -> KeysValues:
        k, v = self.arrays
        return k[place, :, :slots], v[place, :, :slots]

    def expose(self, rows: int, slots: int) -> KeysValues:
        """Let a forward see so much."""
        self.keys, self.values = (x[:rows, :, :slots] for x in self.arrays)
        return self.keys, self.values


class RaggedCache(RewindableRows, DynamicCache):
    """Rows with their own lengths. `prepare` before a forward, `advance` behind it. A forward sees
    rows by place; `order` says which they are."""

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
        self.base_lengths = [0] * rows  # the length at which each row's states stand
        self.cursor: Any = None  # where a pass puts what its states follow from
        self.current_layer = -1  # the layer that asked for its state last
        self.recurrence_calls = 0  # of recurrences, that this layer has run
        self.lengths = [0] * rows
        self.long = [False] * rows  # which are read with the factors of long texts
        self.position_shift = [0] * rows  # of the positions behind each row's media
        self.shown = HiddenStateStore(rows)
        self.slots = list(range(rows))
        self.order = self.slots  # the row in each place, once gaps are closed
        self.device = device
        # for which there is room; on a CPU, memory that is not touched costs nothing
        self.rows = add_spare_rows(rows) if device.type == "cpu" else rows
        self.capacity = 0  # slots
        self.max_context = 0
        self.width = 0  # of the running forward's block, padding included
        self.end = 0  # slots that the running forward sees
        self.offset: int | Tensor = 0  # first new slot: one number where rows are even, else [B]
        self.positions = torch.empty(0)  # [B, width]: of new tokens, and the slots they go to
        self.last_keys: Any = None  # the keys handed out last
        self.masks_by_source: dict[
            int, tuple[Tensor, Tensor]
        ] = {}  # what `once` made in this forward
        self.encoder_mask: Tensor | None = (
            None  # [B, S], 1 where an encoder's states are a row's own
        )

    @property
    def decoder(self) -> RaggedCache:
        """The decoder's cache: of a decoder-only model this is the whole cache."""
        return self

    def prepare(self, width: int, counts: list[int] | None = None) -> None:
        """Make room for `width` more tokens in every row and lay out where they go. counts: how
        many of them are a row's own; None: all."""
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
        """From now on each row holds this many of the block's tokens."""
        self.lengths = [n + t for n, t in zip(self.lengths, tokens, strict=True)]
        self.last_keys = None
        self.masks_by_source.clear()

    def compute_once(self, source: Tensor, make: Callable[[], Tensor]) -> Tensor:
        """`make()`, once per `source` and forward: layers are given the same masks and biases."""
        if id(source) not in self.masks_by_source:
            self.masks_by_source[id(source)] = source, make()
        return self.masks_by_source[id(source)][1]

    def to_slot_order(self, x: Tensor) -> Tensor:
        """`x [B, ..]`, of rows, in the order in which a forward sees them."""
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

    def shared_kv(self, layer: int, rows: list[int], first: int) -> SharedKV:
        """Return a layer's slots from `first` up to the longest of these rows. Only rows that do
        not stand in the first places, in their order, are copied."""
        end, places = max(self.lengths[b] for b in rows), [self.slots[b] for b in rows]
        index = slice(len(places)) if places == list(range(len(places))) else places
        return SharedKV(*(x[index, :, first:end] for x in self.layers[layer].arrays))

    @property
    def slot_bytes(self) -> int:
        """Bytes of a token, in all layers."""
        ragged = [layer for layer in self.list_filled_parts() if isinstance(layer, RaggedLayer)]
        arrays = [x for layer in ragged for x in layer.arrays]
        return sum(x.shape[1] * x.shape[3] * x.itemsize for x in arrays)

    @property
    def state_bytes(self) -> int:
        """Bytes of a row's states, in all layers."""
        arrays = [x for layer in self.states.values() for x in layer.arrays.values()]
        return sum(x[0].numel() * x.itemsize for x in arrays)

    def parts(self) -> list[Any]:
        """The layers that keep tokens, and the states."""
        ragged = [layer for layer in self.layers if isinstance(layer, RaggedLayer)]
        return [*ragged, *self.states.values()]

    # Methods that transformers calls during a forward.

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> KeysValues:
        layer, new = self.layers[layer_idx], (key_states, value_states)
        if not isinstance(layer, RaggedLayer):
            return layer.update(*new, *args, **kwargs)
        if not layer.is_initialized:
            layer.resize(new, self.rows, self.capacity, len(key_states))
        for x, states in zip(layer.arrays, new, strict=True):
            if isinstance(self.offset, int):
                x[: len(states), :, self.offset : self.end] = states
            else:
                x[self.row, :, self.positions] = states.transpose(1, 2)
        self.last_keys, values = layer.expose(len(key_states), self.end)
        return self.last_keys, values

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return self.end, 0

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.offset

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.end - self.width

    # Methods that transformers' layers with states call, and, for their recurrences, ours

    def get_conv_state(self, layer_idx: int, state_idx: int = 0) -> None:
        """None: a family then runs the form that it has for blocks, at every width."""

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
        """Keep nothing: a recurrence of ours has. Raises RefusedError where none was run."""
        if not self.recurrence_calls:
            raise RefusedError(
                "a layer computes its states by a function that is not known here, and which would "
                f"begin each block at nothing; {ALTERNATIVES_HINT}"
            )
        return recurrent_states

    def advance_recurrence(
        self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None
    ) -> Tensor:
        """Run the recurrence (`states.advanced`) of the layer that asked for its state last."""
        self.recurrence_calls += 1
        return self.states[self.current_layer].advance_recurrence(
            q, k, v, g, beta, self.cursor, self.rows
        )

    def advance_scan(self, q: Tensor, k: Tensor, u: Tensor, t: Tensor, A: Tensor) -> Tensor:
        """Run the next selective scan (`StateLayer.scan`) of that layer."""
        self.recurrence_calls += 1
        return self.states[self.current_layer].advance_scan(
            q, k, u, t, A, self.recurrence_calls - 1, self.cursor, self.rows
        )


class CrossCache(EncoderDecoderCache):
    """A ragged cache and, beside it, another one for the encoder's keys and values, whose lengths
    are those of the sources. Both have the same places."""

    self_attention_cache: RaggedCache
    cross_attention_cache: RaggedCache

    def __init__(self, ragged: RaggedCache, cross: RaggedCache, sources: list[int]) -> None:
        super().__init__(ragged, cross)
        cross.lengths = sources  # tokens of each row's source
        self.states: Tensor | None = None  # the encoder's, until their keys and values are cached

    @property
    def decoder(self) -> RaggedCache:
        return self.self_attention_cache

    @property
    def cross(self) -> RaggedCache:
        return self.cross_attention_cache

    def get_query_offset(self, layer_idx: int = 0) -> Any:
        return self.decoder.offset

    def prepare(self, width: int, counts: list[int] | None = None) -> None:
        """Prepare both caches; the first forward writes all that there is of the sources."""
        self.decoder.prepare(width, counts)
        self.cross.prepare(0)
        self.cross.offset = 0
        for layer in self.cross.list_filled_parts():
            layer.expose(len(self.cross.lengths), self.cross.end)

    def make_source_mask(self) -> Tensor | None:
        """`[B, S]` by place, 1 where a source has a token; None where all are equally long."""
        sources, device = self.cross.lengths, self.decoder.device
        if min(sources) == max(sources):
            return None
        lengths = self.cross.to_slot_order(send(torch.tensor(sources), device))
        return (torch.arange(max(sources), device=device) < lengths[:, None]).long()

    def join(self, other: CrossCache) -> None:
        """The rows of `other` join behind these; both have been through a forward."""
        self.decoder.join(other.decoder)
        self.cross.join(other.cross)

    def select(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was."""
        self.decoder.select(rows)
        self.cross.select(rows)


def fill_slots(x: Tensor, new: Tensor) -> None:
    """Put `new` into the first slots, and zeros into the others: what a mask hides is still
    multiplied by zero, and NaN that another row has left would survive that."""
    slots = new.shape[-2]
    x[..., :slots, :] = new
    x[..., slots:, :] = 0


def make_cache_argument(model: PreTrainedModel, cache: Any) -> dict[str, Any]:
    """The cache, by the name that the model's forward has for it."""
    return {_find_cache_parameter(type(model)): cache}


@lru_cache
def _find_cache_parameter(model_class: type[PreTrainedModel]) -> str:
    """transformers renamed it in 5.24; a model's own code may have the old name still, or none."""
    for each in model_class.__mro__:
        named = signature(each.forward).parameters if "forward" in vars(each) else {}
        for name in ("past_key_values", "cache", "cache_params"):
            if name in named:
                return name
    return "past_key_values"


def make_ragged_cache(model: PreTrainedModel, rows: int) -> RaggedCache:
    """An empty cache for `rows` rows of this model."""
    stock = DynamicCache(config=model.config).layers
    names = [type(x).__name__ for x in stock]
    with_tokens = TOKEN_LAYERS | HYBRID_LAYERS
    layers = [RaggedLayer() if n in with_tokens else x for n, x in zip(names, stock, strict=True)]
    states = {
        i: RecurrentStateLayer() for i, n in enumerate(names) if n in STATE_LAYERS | HYBRID_LAYERS
    }
    # the stock ones are the encoder's
    for name in ("num_decoder_layers", "decoder_layers", "decoder_num_hidden_layers"):
        if model.config.is_encoder_decoder and getattr(model.config, name, None):
            layers = [RaggedLayer() for _ in range(getattr(model.config, name))]
    return RaggedCache(layers, rows, model.device, states)


def admit(model: PreTrainedModel, *, states: bool = False) -> None:
    """Raise RefusedError, with a reason, for a model that cannot be rolled back row by row. states:
    whether states beside keys and values can be."""
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2])
    if not SUPPORTED_TRANSFORMERS[0] <= version < SUPPORTED_TRANSFORMERS[1]:
        raise RefusedError(
            f"transformers {transformers.__version__}: the cache needs transformers>=5.20,<6"
        )
    reason, name = (
        find_rollback_objection(model),
        f"{model.config.model_type} ({type(model).__name__})",
    )
    if reason:
        raise RefusedError(f"{name} cannot be run exactly: {reason}; {ALTERNATIVES_HINT}")
    if not states and keeps_states(model):
        raise RefusedError(
            f"{name} keeps states beside keys and values: runtime='transformers' takes them back"
        )


def find_generation_objection(model: PreTrainedModel) -> str | None:
    """Why this model writes no text from ids that could be called its own, or None."""
    if model.main_input_name != "input_ids" and not model.config.is_encoder_decoder:
        return f"it reads {model.main_input_name}, not text"
    if not model.can_generate():
        return "it has no head that generates text; load its ForCausalLM class"
    if model.config.is_encoder_decoder:
        return None
    if getattr(model.config, "is_decoder", True) is False and _is_bidirectional(model):
        return "its config says is_decoder false: it fills in masked words; set is_decoder"
    if _counts_from_padding(model):
        return (
            "its own code counts positions from the padding id, as RoBERTa's, and transformers' "
            "generate from 0: what it writes is not what it was trained for"
        )
    if _hashes_at_random(model.config):
        return (
            "its attention hashes by random numbers, so that it writes another text each time; set "
            "hash_seed and num_buckets in its config"
        )
    return None


def _is_bidirectional(model: PreTrainedModel) -> bool:
    """Tell whether no attention is causal, as BERT's."""
    return not any(getattr(part, "is_causal", False) for part in model.modules())


def _counts_from_padding(model: PreTrainedModel) -> bool:
    counts = any(hasattr(part, POSITION_IDS_METHOD) for part in model.modules())
    return counts and not counts_own_positions(model)


def has_own_attention(part: Any) -> bool:
    """Tell whether a family's layers attend by code of their own, outside transformers' interface
    (ALiBi and older models)."""
    return isinstance(part, PreTrainedModel) and not part._can_set_attn_implementation()


def _hashes_at_random(config: Any) -> bool:
    """Tell whether LSH attention, as Reformer's, draws its hashes anew in each pass."""
    settings = [getattr(config, name, None) for name in ("hash_seed", "num_buckets")]
    return "lsh" in (getattr(config, "attn_layers", None) or ()) and None in settings


def find_rollback_objection(model: PreTrainedModel) -> str | None:
    """Why this model's rows could not be rolled back one by one, or None."""
    reason = find_generation_objection(model)
    if reason:
        return reason
    if model.config.model_type in UNSUPPORTED_MODEL_TYPES:
        return "it makes more of a picture than a text's tokens, or an encoder's states"
    if getattr(model.config, "attention_type", "") == "block_sparse":
        return "its attention changes with how much it reads at once; set attention_type"
    own: list[Any] = [part for part in model.modules() if has_own_attention(part)]
    kinds = {part.config._attn_implementation for part in own}
    if kinds - MASKED_ATTENTIONS:
        named = ", ".join(sorted(map(str, kinds - MASKED_ATTENTIONS)))
        return f"its own code takes no masks in {named}; set attn_implementation to 'eager'"
    try:
        names = _list_cache_layers(model)
    except Exception as error:  # a config without what transformers looks for
        kind = log_error_kind(error)
        return f"its config does not say what its layers keep (transformers raised {kind})"
    unknown = sorted(names - TOKEN_LAYERS - EMPTY_LAYERS - STATE_LAYERS - HYBRID_LAYERS)
    if unknown:
        return f"its cache layers ({', '.join(unknown)}) keep a state that is not per token"
    return None


def keeps_states(model: PreTrainedModel) -> bool:
    """Tell whether it keeps states beside keys and values, or instead."""
    stateful = bool(_list_cache_layers(model) & (STATE_LAYERS | HYBRID_LAYERS))
    return stateful or getattr(model, "_is_stateful", False)


def _list_cache_layers(model: PreTrainedModel) -> set[str]:
    """Names of the layers of transformers' own cache."""
    return {type(layer).__name__ for layer in DynamicCache(config=model.config).layers}
