"""Attention of transformers' own models over a ragged cache, without a change to their code.

The causal mask is built from each row's own offset, and so are T5's relative bias and Bart's
positions. `RaggedTwin` has a twin of the model that attends so, a second module tree over the same
weights, whose output layer is applied only to the positions that are needed: a prefill never makes
rows as wide as the vocabulary. The model itself stays stock, in every thread, and wherever a Ctrl-C
comes.

Long rope (Phi-3, Phi-4-mini, PhiMoE) reads texts of up to N tokens with one set of rotary factors,
longer ones with another, all of their tokens. transformers' `generate` reads a text again when it
outgrows N. Here a row says for itself which set it is read with, so that rows of both kinds share a
pass: `LONG_ROW_OFFSET` is added to the position ids of a long one.
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

ATTENTION_FIELD = "_attn_implementation_internal"  # where a config holds the name of its attention
CAPTURE_HOOKS_FLAG = "_output_capturing_hooks_installed"  # transformers' mark of its own
HOOK_FIELDS = ("_forward_hooks", "_forward_pre_hooks")
PADDING_CHECK_METHOD = "warn_if_padding_and_no_attention_mask"
MAX_STACKED_TOKENS = 64  # tokens; a longer block's mask, once per query head, would be large


class NeededPositions:
    """The last need[b] of counts[b] tokens, of blocks padded on the right to one width, which
    stand in `places`."""

    def __init__(
        self, counts: list[int], need: list[int], places: list[int], device: torch.device
    ) -> None:
        assert all(n <= x for n, x in zip(need, counts, strict=True)), "more than a block has"
        self.max_need = max(need)
        starts = [x - n if n else None for n, x in zip(need, counts, strict=True)]
        firsts = {start for start in starts if start is not None} or {0}
        self.first = firsts.pop()
        self.aligned = not firsts and places == list(range(len(places)))
        self.hidden: Tensor | None = None  # what the output layer read: these positions only
        self.padding: Tensor | None = None  # [B, max(need), 1], True there; None: there is none
        if min(need) < self.max_need:
            missing = torch.arange(self.max_need) >= torch.tensor(need)[:, None]
            self.padding = send(missing[..., None], device)
        if not self.aligned:
            last = max(counts) - 1
            tokens = [[min((s or 0) + i, last) for i in range(self.max_need)] for s in starts]
            self.rows = send(torch.tensor(places), device)[:, None]
            self.tokens = send(torch.tensor(tokens, dtype=torch.long), device)  # of none too

    def select(self, x: Tensor) -> Tensor:
        """`[B, width, n]`, by place -> `[B, max(need), n]`, by row; one that needs fewer is padded
        with zeros, as its others may be invalid, which is no mate's concern."""
        if self.aligned:
            selected = x[:, self.first : self.first + self.max_need]
        else:
            selected = x[self.rows, self.tokens]
        return selected if self.padding is None else selected.masked_fill(self.padding, 0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        self.hidden = self.select(args[0])
        return self.hidden, *args[1:]

    def logits(self, logits: Tensor) -> Tensor:
        """A model's logits as `[B, max(need), V]`, also where its head is no layer with a hook."""
        return self.select(logits) if self.hidden is None else logits


class SelectedPositions:
    """Lets hidden states at flat places of a block through, `[1, N, H]`."""

    def __init__(self, indices: Tensor) -> None:
        self.indices = indices
        self.hidden = torch.empty(0)

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        rows = args[0].reshape(-1, args[0].shape[-1])
        self.hidden = rows.index_select(0, self.indices)[None]
        return self.hidden, *args[1:]


class HiddenStatesRecorder:
    """Lets everything through and notes it."""

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
    """`[B, 1, q, K]`, True where a query attends: the model's rule at each row's own positions.

    Padding needs no 2D mask: it stands behind a row's tokens, where causality hides it.
    """
    if not isinstance(q_offset, Tensor):
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **kwargs
        )
    device = kwargs["device"]
    b = torch.arange(batch_size, device=device)[:, None, None, None]
    head = b.new_zeros(1, 1, 1, 1)
    q = (q_offset[:, None] + torch.arange(q_length, device=device))[:, None, :, None]
    kv = torch.arange(kv_length, device=device)[None, None, None, :]
    return mask_function(b, head, q, kv).expand(batch_size, -1, q_length, kv_length)


def ragged_eager_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """`ragged_mask` for attention code that adds its mask to the scores."""
    if not isinstance(kwargs.get("q_offset"), Tensor):
        return eager_mask(batch_size, q_length, kv_length, **kwargs)
    mask = ragged_mask(batch_size, q_length, kv_length, **kwargs)
    return to_additive_mask(mask, torch.zeros((), dtype=kwargs["dtype"], device=kwargs["device"]))


def to_additive_mask(mask: Tensor | None, bias: Tensor) -> Tensor:
    if mask is None:
        return bias
    return torch.where(mask, bias, torch.finfo(bias.dtype).min)


def ragged_sdpa(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stock attention, but with T5's relative bias of each row, and shared keys not copied."""
    scale = kwargs.get("scaling")
    if torch.compiler.is_compiling():  # within a layer, whose keys are the cache's
        if position_bias is not None or not can_stack_queries(query, attention_mask):
            raise RefusedError("attention of this form is not compiled")
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
    """Each row's relative bias `[B, H, q, K]` plus the mask; made once for all layers."""
    return cache.compute_once(
        bias, lambda: to_additive_mask(mask, shift_bias(cache, bias)).contiguous()
    )


def shift_bias(cache: RaggedCache, bias: Tensor) -> Tensor:
    """Relative bias for `cache.longest` past tokens `[1, H, q, K]` -> the rows' own `[B, H, q, K]`.

    It depends on slot - position only, so a row that is s tokens shorter reads it s slots to the
    right.
    """
    if not isinstance(cache.offset, Tensor):
        return bias
    slots = torch.arange(bias.shape[-1], device=bias.device)
    index = (slots + (cache.max_context - cache.offset)[:, None]).clamp(max=bias.shape[-1] - 1)
    index = index[:, None, None].expand(-1, bias.shape[1], bias.shape[2], -1)
    return bias.expand(len(cache.lengths), -1, -1, -1).gather(-1, index)


def can_stack_queries(query: Tensor, mask: Tensor | None) -> bool:
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
    """Attention `[B, q, H, dim]`; query heads that share keys are stacked as one longer block.

    Stock code copies the keys once per query head instead, which for a block of a few tokens costs
    several times the attention itself, and makes the mask additive once per layer. No mask: a
    single query, which sees everything.
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


def ragged_eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The attention of the model's own file, which knows what sdpa does not (softcap, sinks)."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


AttentionInterface.register("ragged_sdpa", ragged_sdpa)
AttentionInterface.register("ragged_eager", ragged_eager)
AttentionMaskInterface.register("ragged_sdpa", ragged_mask)
AttentionMaskInterface.register("ragged_eager", ragged_eager_mask)


class RaggedTwin:
    """A twin of `model`, over the same weights, whose attention is ragged. `taps`: where its
    forwards may note their states."""

    def __init__(self, model: PreTrainedModel, taps: tuple[int, ...] = ()) -> None:
        self._original, self._taps = model, taps
        self.renew()

    def renew(self) -> None:
        """Make the twin anew, as the original may have changed since; for the start of a run."""
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
        """The twin, to be run over `cache`, its output layer only at the positions `needed`."""
        token = FORWARD_CONTEXT.set(ForwardContext(cache, needed, tap_states))
        try:
            yield self.model
        finally:
            FORWARD_CONTEXT.reset(token)


def make_twin_with_attention(
    model: PreTrainedModel, attention: str | None = None
) -> PreTrainedModel:
    """A twin with this attention, by default the ragged one.

    Families whose attention is their own code have the masks alone: their layers keep one of the
    kinds that their code knows, and the masks are made in its form.
    """
    copied = make_twin(model)
    for part in copied.modules():
        if isinstance(part, PreTrainedModel):
            kind = "sdpa" if part._supports_sdpa else "eager"
            settings: dict[str, Any] = {ATTENTION_FIELD: attention or f"ragged_{kind}"}
            if has_own_attention(part):
                _set_existing(part.config, {ATTENTION_FIELD: kind})
                part.config = copy.copy(part.config)
                # MPT cuts its bias from so many slots, and padding may pass the end
                settings["max_seq_len"] = 2 * PREFILL_CHUNK_TOKENS + (
                    getattr(part.config, "max_seq_len", None) or 0
                )
            _set_existing(part.config, settings)
            vars(part)[PADDING_CHECK_METHOD] = _skip_padding_check
    return copied


def _set_existing(config: PreTrainedConfig, settings: dict[str, Any]) -> None:
    own = vars(config)  # its setattr validates
    own.update((name, value) for name, value in settings.items() if name in own)


def _skip_padding_check(*args: Any, **kwargs: Any) -> None:
    """Do not look for padding in the ids: the host would wait for a device."""


def select_needed_positions(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward pre-hook of the output layer."""
    needed = FORWARD_CONTEXT.get().needed
    return needed.enter(head, args) if needed is not None else None


def mask_encoder_states(
    decoder: nn.Module, args: tuple[Any, ...], given: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """A forward pre-hook of a decoder, which hides the states of an encoder of sounds or pictures
    behind a row's own: families take a mask of what was heard, and shorten it each in its way."""
    heard = getattr(FORWARD_CONTEXT.get().cache, "encoder_mask", None)
    if heard is None or "encoder_attention_mask" not in given:
        return None
    return args, given | {"encoder_attention_mask": heard}


def install_long_rope(model: PreTrainedModel) -> None:
    """Let the rotary parts of a twin serve rows on either side of its switch."""
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
    """Rotary embeddings by the short factors, and by the long ones where `LONG_ROW_OFFSET` is
    added to the positions. `rotary` is transformers' part, which takes the set that its longest
    text needs."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        super().__init__()
        self.length = length
        self.short, self.long = (_fix_rope_factors(rotary, at) for at in (0, length))
        self.embed: Any = inspect.unwrap(type(rotary).forward)  # without the search for the longest
        self.eval()

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        long = position_ids >= LONG_ROW_OFFSET
        short_positions = position_ids.clamp(max=self.length - 1)
        # one more position, as some families look for the longest themselves
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
    """A copy with the factors of a text that ends at this position."""
    settled = copy.deepcopy(rotary)
    device = next(settled.buffers()).device
    settled(torch.zeros(1, device=device), torch.tensor([[position]], device=device))
    return settled


def make_twin(model: PreTrainedModel) -> PreTrainedModel:
    """`model` as it stands, in evaluation mode, over its very weights and hooks.

    Later changes of the weights show in the twin, other changes do not: each run makes a new one.
    Buffers that some forwards recompute, such as rotary frequencies, are the twin's own. Raises
    RefusedError where a part's forward was replaced by an unknown function.
    """
    parts = list(model.modules())
    twins = [type(part).__new__(type(part)) for part in parts]
    memo: dict[int, Any] = {id(part): copied for part, copied in zip(parts, twins, strict=True)}
    for part, copied in zip(parts, twins, strict=True):
        attributes = _copy_attributes(part).items()
        vars(copied).update({name: _convert_to_twin(value, memo) for name, value in attributes})
    return cast(PreTrainedModel, twins[0])


def _copy_attributes(part: nn.Module) -> dict[str, Any]:
    """A part's attributes for its twin. A compiled forward would run the original: the one it
    was compiled from is taken. Hooks that transformers leaves behind `output_hidden_states=True`
    are left out: they cannot be compiled, and are made again where a forward asks for states."""
    own = vars(part) | {
        "training": False,
        "_compiled_call_impl": None,
        "_buffers": _copy_buffers(part),
    }
    for name in HOOK_FIELDS:  # copies: a twin gets hooks of its own
        hooks = own[name].items()
        own[name] = OrderedDict((k, x) for k, x in hooks if not _is_capture_hook(x))
        own[f"{name}_with_kwargs"] = own[f"{name}_with_kwargs"].copy()
    if CAPTURE_HOOKS_FLAG in own:
        own[CAPTURE_HOOKS_FLAG] = (
            False  # a part that reads states, as those of pictures do, hooks its own
        )
    if "forward" in own:
        own["forward"] = getattr(own["forward"], "_torchdynamo_orig_callable", own["forward"])
        if not isinstance(own["forward"], MethodType | partial):
            raise RefusedError(
                f"the forward of {type(part).__name__} was replaced by {own['forward']!r:.60}, "
                "which may do anything; give the model as transformers makes it"
            )
    return own


def _is_capture_hook(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == output_capturing.__name__


def _copy_buffers(part: nn.Module) -> dict[str, Any]:
    """The same buffers, but copies of those that are computed and not saved. A packed weight, which
    is not saved either, stays the one."""
    computed = part._non_persistent_buffers_set
    own = dict(part._buffers)
    for name, x in part._buffers.items():
        if name in computed and x is not None and x.is_floating_point() and not x.is_mkldnn:
            own[name] = x.clone()
    return own


def _convert_to_twin(value: Any, memo: dict[int, Any]) -> Any:
    """The same value for the twin: modules become the twin's, configurations copies. `memo`: what
    has been made already, by the id of its original."""
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
