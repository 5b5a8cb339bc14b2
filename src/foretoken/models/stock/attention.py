"""Attention of transformers' own models over a ragged cache, without a change to their code.

The causal mask is built from each row's own offset, and so are T5's relative bias and Bart's
positions. `Forward` has a twin of the model that attends so: the model itself stays stock.
With cache.py this is all that knows transformers' cache, mask and attention interfaces.
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
from foretoken.models.stock.needed import Shown
from foretoken.models.stock.twin import twin

ATTENTION = "_attn_implementation_internal"  # where a config holds the name of its attention
EXPERTS = "_experts_implementation_internal"
PAD = "pad_token_id"  # without one no model looks for padding, for which a device's host waits
SHORT = 64  # tokens; a longer block's mask, once per query head, would be large


class Running(NamedTuple):
    """What a forward under way runs over. A Ctrl-C may leave it behind: only models of `Forward`
    look at it, and each of their runs has its own."""

    cache: Any  # RaggedCache, or what an export traces; None: a source, or a decoder that begins
    needed: Shown | None


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
    """`[B, 1, q, K]`, True where a query may look: the model's rule at each row's own positions.

    No 2D mask is needed besides: padding stands behind a row's tokens, where causality hides it.
    """
    if not isinstance(q_offset, Tensor):
        return sdpa_mask(
            batch_size, q_length, kv_length, q_offset, kv_offset, mask_function, **kwargs
        )
    device = kwargs["device"]
    b = torch.arange(batch_size, device=device)[:, None, None, None]
    cache = RUNNING.get().cache
    if cache is not None and cache.tree is not None:
        depths, seen = cache.tree.depths[:, None, None], cache.tree.seen[:, None]
        by_rule = mask_function(
            b, b.new_zeros(1, 1, 1, 1), cache.positions[:, None, :, None], depths
        )
        return by_rule & seen
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
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    position_bias: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stock attention, but T5's relative bias as each row sees it, and shared keys not copied."""
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
    """Relative bias `[B, H, q, K]` as each row sees it, the mask in it; once for all layers."""
    return cache.once(bias, lambda: additive(mask, shifted(cache, bias)).contiguous())


def shifted(cache: RaggedCache, bias: Tensor) -> Tensor:
    """Relative bias for `cache.longest` past tokens `[1, H, q, K]` -> the rows' own `[B, H, q, K]`.

    It depends on slot - position only, so a row that is s tokens shorter reads it s slots to the
    right. In a tree the last query, for which all distances are there, is read by distance.
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
    """Attention `[B, q, H, dim]` whose query heads may share keys: they stand in one block.

    Stock code copies the keys once per query head instead, which for a block of a few tokens costs
    several times the attention itself, and makes the mask additive once per layer. No mask: a
    single query, which sees everything.
    """
    b, heads, q, dim = query.shape
    few, group = key.shape[1], heads // key.shape[1]
    if mask is not None:
        hidden, zero = mask, query.new_zeros(())
        mask = cache.once(hidden, lambda: additive(hidden, zero).repeat(1, 1, group, 1))
    out = F.scaled_dot_product_attention(
        query.reshape(b, few, group * q, dim), key, value, attn_mask=mask, scale=scale
    )
    return out.reshape(b, heads, q, -1).transpose(1, 2).contiguous()


def ragged_eager(module: nn.Module, *args: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The attention function of the model's own file, for what sdpa cannot do (softcap, sinks)."""
    return sys.modules[type(module).__module__].eager_attention_forward(module, *args, **kwargs)


AttentionInterface.register("ragged_sdpa", ragged_sdpa)
AttentionInterface.register("ragged_eager", ragged_eager)
AttentionMaskInterface.register("ragged_sdpa", ragged_mask)
AttentionMaskInterface.register("ragged_eager", ragged_eager_mask)


class Forward:
    """A model over the same weights whose attention is ragged: `model` itself is never changed.

    `attention`, `experts`: names of others that are registered with transformers.
    """

    def __init__(
        self, model: PreTrainedModel, attention: str | None = None, experts: str | None = None
    ) -> None:
        ragged = {ATTENTION: "ragged_sdpa" if model._supports_sdpa else "ragged_eager", PAD: None}
        asked = {ATTENTION: attention} | ({EXPERTS: experts} if experts else {})
        self._first, self._settings = model, asked if attention else ragged
        self.renew()

    def renew(self) -> None:
        """Follow what has become of the first model since; for the start of a run."""
        self.model = switched(self._first, self._settings)
        head = self.model.get_output_embeddings()
        if head is not None:
            for hooks in ("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"):
                setattr(head, hooks, getattr(head, hooks).copy())  # the first model keeps its own
            head.register_forward_pre_hook(needed_only)
        decoder: Any = self.model.get_decoder() if self.model.config.is_encoder_decoder else None
        table = getattr(decoder, "embed_positions", None)
        if isinstance(table, nn.Embedding):
            decoder.embed_positions = OwnPositions(table)

    @contextmanager
    def __call__(
        self, cache: RaggedCache | None, needed: Shown | None = None
    ) -> Iterator[PreTrainedModel]:
        """The model, to be run over `cache`, and with the output layer at the positions that are
        `needed` only."""
        token = RUNNING.set(Running(cache, needed))
        try:
            yield self.model
        finally:
            RUNNING.reset(token)


def switched(model: PreTrainedModel, settings: dict[str, Any]) -> PreTrainedModel:
    """A twin whose configurations have these settings, where they have such at all."""
    made = twin(model)
    for part in made.modules():
        if isinstance(part, PreTrainedModel):
            own = vars(part.config)  # its setattr validates
            own.update((name, value) for name, value in settings.items() if name in own)
    return made


def needed_only(head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """A forward pre-hook of the output layer."""
    needed = RUNNING.get().needed
    return needed.enter(head, args) if needed is not None else None


class OwnPositions(nn.Module):
    """Embeddings of each row's own positions, for decoders that count from the longest row: there
    the table may have ended."""

    def __init__(self, table: nn.Embedding) -> None:
        super().__init__()
        self.table = table
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        cache = RUNNING.get().cache
        if cache is None:  # a decoder that begins
            return self.table(*args, **kwargs)
        places = cache.positions + getattr(self.table, "offset", 0)
        return F.embedding(places.clamp(max=len(self.table.weight) - 1), self.table.weight)
