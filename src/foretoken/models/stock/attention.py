"""Attention of transformers' own models over a ragged cache, without a change to their code.

The causal mask is built from each row's own offset, and so are T5's relative bias and Bart's
positions. `Forward` has a twin of the model that attends so: the model itself stays stock.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import eager_mask, sdpa_mask

from foretoken.models.stock.cache import RaggedCache
from foretoken.models.stock.longrope import give_both
from foretoken.models.stock.needed import HeadHook
from foretoken.models.stock.twin import twin

ATTENTION = "_attn_implementation_internal"  # where a config holds the name of its attention
EXPERTS = "_experts_implementation_internal"
PAD = "pad_token_id"  # None: else models look for padding, and the host waits for a device
SHORT = 64  # tokens; a longer block's mask, once per query head, would be large


class Running(NamedTuple):
    """The context of a forward under way. A Ctrl-C may leave it set, to no harm: only models of
    `Forward` read it, and each of their runs sets its own."""

    cache: Any  # RaggedCache, or an export's; None: no ragged rows, as in an encoder
    needed: HeadHook | None


IDLE = Running(None, None)
RUNNING: ContextVar[Running] = ContextVar("foretoken_running", default=IDLE)


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
    cache = RUNNING.get().cache
    if cache is not None and cache.tree is not None:
        q, kv = cache.positions[:, None, :, None], cache.tree.depths[:, None, None]
        return mask_function(b, head, q, kv) & cache.tree.seen[:, None]
    q = (q_offset[:, None] + torch.arange(q_length, device=device))[:, None, :, None]
    kv = torch.arange(kv_length, device=device)[None, None, None, :]
    return mask_function(b, head, q, kv).expand(batch_size, -1, q_length, kv_length)


def ragged_eager_mask(batch_size: int, q_length: int, kv_length: int, **kwargs: Any) -> Tensor:
    """`ragged_mask` for attention code that adds its mask to the scores."""
    if not isinstance(kwargs.get("q_offset"), Tensor):
        return eager_mask(batch_size, q_length, kv_length, **kwargs)
    mask = ragged_mask(batch_size, q_length, kv_length, **kwargs)
    return additive(mask, torch.zeros((), dtype=kwargs["dtype"], device=kwargs["device"]))


def additive(mask: Tensor | None, bias: Tensor) -> Tensor:
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
    cache = RUNNING.get().cache
    if cache is not None and key is cache.view:
        if position_bias is not None:
            if attention_mask is not None or query.shape[2] == 1:
                attention_mask = own_bias(cache, position_bias, attention_mask)
                position_bias = None
        elif stackable(query, attention_mask):
            return shared(cache, query, key, value, attention_mask, kwargs.get("scaling")), None
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, position_bias=position_bias, **kwargs
    )


def own_bias(cache: RaggedCache, bias: Tensor, mask: Tensor | None) -> Tensor:
    """Each row's relative bias `[B, H, q, K]` plus the mask; made once for all layers."""
    return cache.once(bias, lambda: additive(mask, shifted(cache, bias)).contiguous())


def shifted(cache: RaggedCache, bias: Tensor) -> Tensor:
    """Relative bias for `cache.longest` past tokens `[1, H, q, K]` -> the rows' own `[B, H, q, K]`.

    It depends on slot - position only, so a row that is s tokens shorter reads it s slots to the
    right. In a tree it is looked up by distance, in the last query's row, which has all distances.
    """
    if cache.tree is not None:
        last = bias.shape[-1] - 1
        index = last + cache.tree.depths[:, None] - cache.positions[..., None]  # [B, q, K]
        return bias[0, :, -1][:, index.clamp(0, last)].transpose(0, 1)
    if not isinstance(cache.offset, Tensor):
        return bias
    slots = torch.arange(bias.shape[-1], device=bias.device)
    index = (slots + (cache.longest - cache.offset)[:, None]).clamp(max=bias.shape[-1] - 1)
    index = index[:, None, None].expand(-1, bias.shape[1], bias.shape[2], -1)
    return bias.expand(len(cache.lengths), -1, -1, -1).gather(-1, index)


def stackable(query: Tensor, mask: Tensor | None) -> bool:
    if mask is None:
        return query.shape[2] == 1
    return mask.shape[1] == 1 and query.shape[2] <= SHORT


def shared(
    cache: RaggedCache,
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
        mask = cache.once(hidden, lambda: additive(hidden, zero).repeat(1, 1, group, 1))
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


class Forward:
    """A twin of `model`, over the same weights, whose attention is ragged.

    `attention`, `experts`: implementations to use instead, by their names in transformers.
    """

    def __init__(
        self, model: PreTrainedModel, attention: str | None = None, experts: str | None = None
    ) -> None:
        ragged = {ATTENTION: "ragged_sdpa" if model._supports_sdpa else "ragged_eager", PAD: None}
        kernels = {ATTENTION: attention} | ({EXPERTS: experts} if experts else {})
        self._original, self._settings = model, kernels if attention else ragged
        self.renew()

    def renew(self) -> None:
        """Make the twin anew, as the original may have changed since; for the start of a run."""
        self.model = switched(self._original, self._settings)
        head = self.model.get_output_embeddings()
        if head is not None:
            for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
                setattr(head, hooks, getattr(head, hooks).copy())  # the original keeps its own
            head.register_forward_pre_hook(needed_only)
        decoder: Any = self.model.get_decoder() if self.model.config.is_encoder_decoder else None
        table = getattr(decoder, "embed_positions", None)
        if isinstance(table, nn.Embedding):
            decoder.embed_positions = OwnPositions(table)
        give_both(self.model)

    @contextmanager
    def __call__(
        self, cache: RaggedCache | None, needed: HeadHook | None = None
    ) -> Iterator[PreTrainedModel]:
        """The twin, to be run over `cache`, its output layer only at the positions `needed`."""
        token = RUNNING.set(Running(cache, needed))
        try:
            yield self.model
        finally:
            RUNNING.reset(token)


def switched(model: PreTrainedModel, settings: dict[str, Any]) -> PreTrainedModel:
    """A twin whose configurations have these settings, where they know them."""
    copied = twin(model)
    for part in copied.modules():
        if isinstance(part, PreTrainedModel):
            own = vars(part.config)  # its setattr validates
            own.update((name, value) for name, value in settings.items() if name in own)
    return copied


def needed_only(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward pre-hook of the output layer."""
    needed = RUNNING.get().needed
    return needed.enter(head, args) if needed is not None else None


class OwnPositions(nn.Module):
    """Embeddings at each row's own positions, in place of a decoder's that counts from the longest
    row; padding past the end of the table reads its last entry."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        cache = RUNNING.get().cache
        if cache is None:
            return self.table(*args, **kwargs)
        places = cache.positions + getattr(self.table, "offset", 0)
        return F.embedding(places.clamp(max=len(self.table.weight) - 1), self.table.weight)
