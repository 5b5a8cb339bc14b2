"""Attention of transformers' own models over a ragged cache, with the models' code unchanged.

The causal mask, T5's relative bias and Bart's positions are computed from each sequence's own
offset. `RaggedTwin` makes a twin of the model with this attention: a second module tree over the
same weights. The twin applies the output layer only to the positions whose logits are needed, so
that a prefill computes no logits. The user's model stays unmodified in every thread, even after a
Ctrl-C.

Long rope (Phi-3, Phi-4-mini, PhiMoE) uses one set of rotary factors for sequences of up to N
tokens, and another set for longer sequences. transformers' `generate` recomputes a sequence when it
grows beyond N. Here each sequence has its own set, and both kinds of sequences share a forward
pass: `LONG_ROW_OFFSET` is added to the position ids of long sequences.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import MethodType
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask
from transformers.utils import output_capturing

from foretoken.errors import RefusedError
from foretoken.models.row_slots import LONG_ROW_OFFSET, PREFILL_CHUNK_TOKENS
from foretoken.models.stock.block_attention import VisibleBlocks, compute_block_attention
from foretoken.models.stock.cache import RaggedCache, has_own_attention
from foretoken.models.stock.positions import (
    FORWARD_CONTEXT,
    ForwardContext,
    HeadHook,
    install_row_positions,
)
from foretoken.models.stock.recurrences import install_row_recurrences
from foretoken.models.stock.sizes import get_rope_switch_length, has_long_rope
from foretoken.models.stock.taps import register_taps
from foretoken.transfer import send

ATTENTION_FIELD = "_attn_implementation_internal"  # a config's attribute for its attention
# a module attribute that transformers sets
CAPTURE_HOOKS_FLAG = "_output_capturing_hooks_installed"
HOOK_FIELDS = ("_forward_hooks", "_forward_pre_hooks")
PADDING_CHECK_METHOD = "warn_if_padding_and_no_attention_mask"
MAX_STACKED_TOKENS = 64  # the masks of longer blocks, repeated per query head, would be large


class NeededPositions:
    """Selects the positions whose logits are needed: the last need[b] of the counts[b] tokens of
    each block b. The blocks are padded on the right to one width. places: each sequence's slot."""

    def __init__(
        self, counts: list[int], need: list[int], places: list[int], device: torch.device
    ) -> None:
        assert all(n <= x for n, x in zip(need, counts, strict=True)), "need exceeds a block"
        self.max_need = max(need)
        starts = [x - n if n else None for n, x in zip(need, counts, strict=True)]
        firsts = {start for start in starts if start is not None} or {0}
        self.first = firsts.pop()
        self.aligned = not firsts and places == list(range(len(places)))
        self.hidden: Tensor | None = None  # the output layer's input, at these positions
        self.padding: Tensor | None = None  # [B, max(need), 1], True at padding; None: no padding
        if min(need) < self.max_need:
            missing = torch.arange(self.max_need) >= torch.tensor(need)[:, None]
            self.padding = send(missing[..., None], device)
        if not self.aligned:
            last = max(counts) - 1
            # Any valid index serves for sequences that need no token, and for padding
            tokens = [[min((s or 0) + i, last) for i in range(self.max_need)] for s in starts]
            self.rows = send(torch.tensor(places), device)[:, None]
            self.tokens = send(torch.tensor(tokens, dtype=torch.long), device)

    def select(self, x: Tensor) -> Tensor:
        """Return the needed positions of x, `[B, width, n]` in slot order, as `[B, max(need), n]`
        in row order. Rows that need fewer than max(need) are padded with 0, since x may be
        non-finite at padding."""
        if self.aligned:
            selected = x[:, self.first : self.first + self.max_need]
        else:
            selected = x[self.rows, self.tokens]
        return selected if self.padding is None else selected.masked_fill(self.padding, 0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.hidden = self.select(args[0])
        return self.hidden, *args[1:]

    def logits(self, logits: Tensor) -> Tensor:
        """Return a model's logits reduced to `[B, max(need), V]`; if the hook of the output layer
        has run, return them unchanged."""
        return self.select(logits) if self.hidden is None else logits


class SelectedPositions:
    """Passes only the hidden states at `indices` to the output layer, as `[1, N, H]`. The indices
    are positions in the flattened batch."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices
        self.hidden = torch.empty(0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        flat = args[0].reshape(-1, args[0].shape[-1])
        self.hidden = flat.index_select(0, self.indices)[None]
        return self.hidden, *args[1:]


class HiddenStatesRecorder:
    """Lets the output layer compute logits at every position, and records its inputs."""

    def __init__(self) -> None:
        self.hidden = torch.empty(0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> None:
        self.hidden: Tensor = args[0]


def ragged_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    **kwargs: Any,
) -> Tensor | None:
    """Return a mask `[B, 1, q, K]`, True if the query attends to the key, from `mask_function` at
    each sequence's own positions.

    Padding needs no mask of its own: it comes after a sequence's tokens, which never attend to
    later positions.
    """
    if not isinstance(q_offset, Tensor):
        return sdpa_mask(
            batch_size,
            q_length,
            kv_length,
            q_offset,
            kv_offset,
            mask_function,
            **_keep_source_mask(kwargs),
        )
    device = kwargs["device"]
    b = torch.arange(batch_size, device=device)[:, None, None, None]
    head = b.new_zeros(1, 1, 1, 1)
    q = (q_offset[:, None] + torch.arange(q_length, device=device))[:, None, :, None]
    kv = torch.arange(kv_length, device=device)[None, None, None, :]
    return mask_function(b, head, q, kv).expand(batch_size, -1, q_length, kv_length)


def ragged_eager_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """Return `ragged_mask` in the additive form: 0 or the dtype's lowest value, which eager
    attention adds to its scores."""
    if not isinstance(kwargs.get("q_offset"), Tensor):
        return eager_mask(batch_size, q_length, kv_length, **_keep_source_mask(kwargs))
    mask = ragged_mask(batch_size, q_length, kv_length, **kwargs)
    return to_additive_mask(mask, torch.zeros((), dtype=kwargs["dtype"], device=kwargs["device"]))


def _keep_source_mask(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a mask. A decoder's mask of its sources is never left out: to find
    out whether it hides anything, the host would wait for the device."""
    if FORWARD_CONTEXT.get().cache is None or kwargs.get("attention_mask") is None:
        return kwargs
    return kwargs | {"allow_is_bidirectional_skip": False}


def to_additive_mask(mask: Tensor | None, bias: Tensor) -> Tensor:
    """Return the bias, replaced by the lowest value of its dtype wherever the mask is False."""
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def ragged_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,  # Tensor, None, or VisibleBlocks in compiled layers
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Compute the attention of the stock model, with T5's relative bias for each sequence's own
    positions. Keys that several query heads share are not copied."""
    scale = kwargs.get("scaling")
    if isinstance(attention_mask, VisibleBlocks):
        states = compute_block_attention(query, key, value, attention_mask, scale, position_bias)
        return states, None
    # a layer is compiled without the rest of the model; its keys come from the cache
    if torch.compiler.is_compiling():
        if position_bias is not None or not can_stack_queries(query, attention_mask):
            raise RefusedError(
                "attention with a position bias, with a mask for each head, or over a long block "
                "is not compiled"
            )
        return stacked_attention(None, query, key, value, attention_mask, scale), None
    cache = FORWARD_CONTEXT.get().cache
    if cache is not None and key is cache.last_keys:
        if position_bias is not None:
            if attention_mask is not None or query.shape[2] == 1:
                attention_mask = compute_row_bias(cache, position_bias, attention_mask)
                position_bias = None
        elif can_stack_queries(query, attention_mask):
            return stacked_attention(cache, query, key, value, attention_mask, scale), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, position_bias=position_bias, **kwargs
    )


def compute_row_bias(cache: RaggedCache, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Return each sequence's relative bias plus the mask, `[B, H, q, K]`. The sum is computed once
    per forward pass for all layers."""
    return cache.compute_once(
        bias, lambda: to_additive_mask(mask, shift_bias(cache, bias)).contiguous()
    )


def shift_bias(cache: RaggedCache, bias: Tensor) -> Tensor:
    """Return each sequence's relative bias `[B, H, q, K]`, from the bias `[1, H, q, K]` for a
    sequence with `cache.max_context` cached tokens.

    The bias depends only on the distance between key and query. So for a sequence with s fewer
    cached tokens the bias is shifted by s keys.
    """
    if not isinstance(cache.offset, Tensor):
        return bias
    slots = torch.arange(bias.shape[-1], device=bias.device)
    index = (slots + (cache.max_context - cache.offset)[:, None]).clamp(max=bias.shape[-1] - 1)
    index = index[:, None, None].expand(-1, bias.shape[1], bias.shape[2], -1)
    return bias.expand(len(cache.offset), -1, -1, -1).gather(-1, index)


def can_stack_queries(query: Tensor, mask: Tensor | None) -> bool:
    """Return whether `stacked_attention` supports these queries: a single query without a mask, or
    a short block with one mask for all heads."""
    if mask is None:
        return query.shape[2] == 1
    return mask.shape[1] == 1 and query.shape[2] <= MAX_STACKED_TOKENS


def stacked_attention(
    cache: RaggedCache | None,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor | None,
    scale: float | None,
) -> Tensor:
    """Return attention `[B, q, H, dim]`, computed with the query heads that share keys stacked as
    one longer block.

    The stock code instead copies the keys for each query head, which for a few tokens takes several
    times as long as the attention itself, and converts the mask to the additive form in each layer.
    mask: None for a single query that attends to all keys.
    """
    b, heads, q, dim = query.shape
    key_heads, group = key.shape[1], heads // key.shape[1]
    if mask is not None:
        hidden, zero = mask, query.new_zeros(())
        make = lambda: to_additive_mask(hidden, zero).repeat(1, 1, group, 1)  # noqa: E731
        mask = make() if cache is None else cache.compute_once(hidden, make)
    states = F.scaled_dot_product_attention(
        query.reshape(b, key_heads, group * q, dim), key, value, attn_mask=mask, scale=scale
    )
    return states.reshape(b, heads, q, -1).transpose(1, 2).contiguous()


def ragged_eager(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,  # Tensor, None, or VisibleBlocks in compiled layers
    **kwargs: Any,
) -> tuple[Tensor, Any]:
    """Run the eager attention function of the family's Python module. This function applies the
    family's softcap, sinks and the like."""
    if isinstance(attention_mask, VisibleBlocks):
        options = map(kwargs.get, ("scaling", "position_bias", "softcap", "s_aux"))
        return compute_block_attention(query, key, value, attention_mask, *options), None
    eager = sys.modules[type(module).__module__].eager_attention_forward
    return eager(module, query, key, value, attention_mask, **kwargs)


AttentionInterface.register("ragged_sdpa", ragged_sdpa)
AttentionInterface.register("ragged_eager", ragged_eager)
AttentionMaskInterface.register("ragged_sdpa", ragged_mask)
AttentionMaskInterface.register("ragged_eager", ragged_eager_mask)


class RaggedTwin:
    """A twin of `model`: a second module tree over the same weights, with ragged attention. `taps`:
    the layers whose hidden states the twin's forward passes can record."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...] = ()) -> None:
        self._original, self._taps = model, taps
        self.renew()

    def renew(self) -> None:
        """Make the twin again, since the model may have changed. Called when the first sequences
        join."""
        self.model = make_twin_with_attention(self._original)
        register_taps(self.model, self._taps)
        head = self.model.get_output_embeddings()
        if head is not None:
            head.register_forward_pre_hook(select_needed_positions)
        if self.model.config.is_encoder_decoder:
            self.model.get_decoder().register_forward_pre_hook(
                mask_encoder_states, with_kwargs=True
            )
        install_row_positions(self.model)
        install_row_recurrences(self.model)
        install_long_rope(self.model)

    @contextmanager
    def __call__(
        self,
        cache: RaggedCache | None,
        needed: HeadHook | None = None,
        tap_states: dict[int, Tensor] | None = None,
    ) -> Iterator[PreTrainedModel]:
        """Yield the twin for a forward pass over `cache`. The twin's output layer runs only at the
        positions that `needed` selects. tap_states: receives the recorded hidden states by tap."""
        token = FORWARD_CONTEXT.set(ForwardContext(cache, needed, tap_states))
        try:
            yield self.model
        finally:
            FORWARD_CONTEXT.reset(token)


def make_twin_with_attention(
    model: PreTrainedModel, attention: str | None = None
) -> PreTrainedModel:
    """Return a twin with this attention implementation; None: ragged attention.

    A family with its own attention code gets ragged masks only: its layers continue to use sdpa or
    eager attention, and the masks are made for that attention.
    """
    copied = make_twin(model)
    for part in copied.modules():
        if isinstance(part, PreTrainedModel):
            kind = "sdpa" if part._supports_sdpa else "eager"
            settings: dict[str, Any] = {ATTENTION_FIELD: attention or f"ragged_{kind}"}
            if has_own_attention(part):
                _set_existing(part.config, {ATTENTION_FIELD: kind})
                part.config = copy.copy(part.config)
                # MPT slices its bias from a bias for max_seq_len positions, and padding may exceed
                # this limit
                settings["max_seq_len"] = 2 * PREFILL_CHUNK_TOKENS + (
                    getattr(part.config, "max_seq_len", None) or 0
                )
            _set_existing(part.config, settings)
            vars(part)[PADDING_CHECK_METHOD] = _skip_padding_check
    return copied


def _set_existing(config: PreTrainedConfig, settings: dict[str, Any]) -> None:
    own = vars(config)  # a config's setattr would validate the value
    own.update((name, value) for name, value in settings.items() if name in own)


def _skip_padding_check(*args: Any, **kwargs: Any) -> None:
    """Do nothing, instead of looking for padding ids, which would make the host wait for the
    device."""


def select_needed_positions(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Forward pre-hook of the output layer: reduce its input to the needed positions."""
    needed = FORWARD_CONTEXT.get().needed
    return needed.enter(head, args) if needed is not None else None


def mask_encoder_states(
    decoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Forward pre-hook of a decoder: mask the padding of an audio or image encoder's hidden states.
    The mask is set here because families derive it from the mask of the encoder's input in
    different ways."""
    mask = getattr(FORWARD_CONTEXT.get().cache, "encoder_mask", None)
    if mask is None or "encoder_attention_mask" not in given:
        return None
    return args, given | {"encoder_attention_mask": mask}


def install_long_rope(model: PreTrainedModel) -> None:
    """Replace a twin's rotary modules by `LongRopeEmbedding`, so that sequences below and above the
    switch length can share a forward pass."""
    switch_length = get_rope_switch_length(model)
    if switch_length is None:
        return
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            config = getattr(child, "config", None)
            if isinstance(config, PreTrainedConfig) and hasattr(child, "rope_type"):
                if has_long_rope(config):
                    setattr(part, name, LongRopeEmbedding(child, switch_length))


class LongRopeEmbedding(nn.Module):
    """Rotary embeddings for a batch. Positions to which `LONG_ROW_OFFSET` is added use the long
    factors; other positions use the short factors. rotary: transformers' module, which would choose
    one set for the whole batch, by the largest position. length: the switch length."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        super().__init__()
        self.length = length
        self.short, self.long = (_fix_rope_factors(rotary, at) for at in (0, length))
        # without the decorator that chooses the set
        self.embed: Any = inspect.unwrap(type(rotary).forward)
        self.eval()

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        long = position_ids >= LONG_ROW_OFFSET
        short_positions = position_ids.clamp(max=self.length - 1)
        # One position above the switch is added for families whose forward itself chooses the set
        long_positions = torch.where(long, position_ids - LONG_ROW_OFFSET, 0)
        long_positions = torch.cat(
            [long_positions, torch.full_like(long_positions[:, :1], self.length)], 1
        )
        short, beyond = (
            self.embed(self.short, x, short_positions),
            self.embed(self.long, x, long_positions),
        )
        cos, sin = (
            torch.where(long[..., None], b[:, :-1], s) for s, b in zip(short, beyond, strict=True)
        )
        return cos, sin


def _fix_rope_factors(rotary: nn.Module, position: int) -> nn.Module:
    """Return a copy of a rotary module with the factors for a sequence that ends at this
    position."""
    settled = copy.deepcopy(rotary)
    device = next(settled.buffers()).device
    settled(torch.zeros(1, device=device), torch.tensor([[position]], device=device))
    return settled


def make_twin(model: PreTrainedModel) -> PreTrainedModel:
    """Return a twin of `model` as it is now: in evaluation mode, with the same weight tensors and
    hooks.

    Later changes of weight values apply to the twin, but no other changes do, so each batch starts
    with a new twin. Buffers that some forwards recompute, such as rotary frequencies, are copied.
    Raises RefusedError if the forward of a module was replaced by an unknown function.
    """
    parts = list(model.modules())
    twins = [type(part).__new__(type(part)) for part in parts]
    memo: dict[int, Any] = {id(part): copied for part, copied in zip(parts, twins, strict=True)}
    for part, copied in zip(parts, twins, strict=True):
        attributes = _copy_attributes(part).items()
        vars(copied).update({name: _convert_to_twin(value, memo) for name, value in attributes})
    return cast(PreTrainedModel, twins[0])


def _copy_attributes(part: nn.Module) -> dict[str, Any]:
    """Return a module's attributes for its twin.

    A compiled forward would run the original module, so the twin gets the uncompiled forward. Hooks
    that `output_hidden_states=True` has installed are left out, because they cannot be compiled;
    transformers installs them again when they are needed.
    """
    own = vars(part) | {
        "training": False,
        "_compiled_call_impl": None,
        "_buffers": _copy_buffers(part),
    }
    for name in HOOK_FIELDS:  # copied, so that hooks can be added to the twin only
        hooks = own[name].items()
        own[name] = OrderedDict((k, x) for k, x in hooks if not _is_capture_hook(x))
        own[f"{name}_with_kwargs"] = own[f"{name}_with_kwargs"].copy()
    if CAPTURE_HOOKS_FLAG in own:
        own[CAPTURE_HOOKS_FLAG] = False  # so that transformers installs them again
    if "forward" in own:
        own["forward"] = getattr(own["forward"], "_torchdynamo_orig_callable", own["forward"])
        if not isinstance(own["forward"], MethodType | partial):
            raise RefusedError(
                f"the forward of {type(part).__name__} was replaced by {own['forward']!r:.60}; "
                "give the model as transformers makes it"
            )
    return own


def _is_capture_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == output_capturing.__name__


def _copy_buffers(part: nn.Module) -> dict[str, Any]:
    """Return the module's buffers for its twin. Buffers that are computed instead of saved are
    copied, except packed weights; all other buffers are shared."""
    computed = part._non_persistent_buffers_set
    own = dict(part._buffers)
    for name, x in part._buffers.items():
        if name in computed and x is not None and x.is_floating_point() and not x.is_mkldnn:
            own[name] = x.clone()
    return own


def _convert_to_twin(value: Any, memo: dict[int, Any]) -> Any:
    """Return an attribute's value for the twin: modules are replaced by the twin's modules, and
    configs are copied. memo: the twin's modules and configs by id of the original."""
    if isinstance(value, nn.Module):
        return memo.get(id(value), value)
    if isinstance(value, PreTrainedConfig):
        return copy.deepcopy(value, memo)
    if isinstance(value, MethodType):
        return MethodType(value.__func__, _convert_to_twin(value.__self__, memo))
    if isinstance(value, partial):
        arguments = [_convert_to_twin(part, memo) for part in (value.func, *value.args)]
        return partial(
            *arguments, **{k: _convert_to_twin(v, memo) for k, v in value.keywords.items()}
        )
    if isinstance(value, dict) and any(isinstance(part, nn.Module) for part in value.values()):
        return {name: _convert_to_twin(part, memo) for name, part in value.items()}
    if isinstance(value, list | tuple) and any(isinstance(part, nn.Module) for part in value):
        return type(value)(_convert_to_twin(part, memo) for part in value)
    return value
