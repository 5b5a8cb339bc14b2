"""Modules of a twin that use each sequence's own positions, in place of a family's modules that
would count from the longest sequence of the batch; and the context of the current forward pass,
from which the modules get these positions.

The modules replace a decoder's position embeddings, a causal table (GPT-Neo), and a scale that
grows with the position (Llama 4). Families that count positions in other ways fail the self-check.
"""

from __future__ import annotations

import inspect
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedModel


class HeadHook(Protocol):
    """Decides which positions enter the output layer: `enter` returns the layer's arguments reduced
    to these positions, or None for no change."""

    def enter(self, head: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...] | None: ...


class ForwardContext(NamedTuple):
    """The context of the current forward pass. A Ctrl-C may leave an old context set, which is
    harmless: only twins use the context, and each forward pass of a twin sets a new one."""

    cache: Any  # a RaggedCache, or the cache of an export; None: an encoder runs
    needed: HeadHook | None
    # receives hidden states by tap; None: none are recorded
    tap_states: dict[int, Tensor] | None = None


POSITION_IDS_METHOD = "create_position_ids_from_input_ids"
NO_FORWARD = ForwardContext(None, None)
FORWARD_CONTEXT: ContextVar[ForwardContext] = ContextVar("foretoken_running", default=NO_FORWARD)


def takes_positions(model: PreTrainedModel) -> bool:
    """Return whether a model's decoder takes position ids as an argument."""
    accepted = inspect.signature(model.forward).parameters
    if model.config.is_encoder_decoder:
        return "decoder_position_ids" in accepted
    return "position_ids" in accepted and not counts_own_positions(model)


def counts_own_positions(model: PreTrainedModel) -> bool:
    """Return whether the model's own code counts positions from the padding id even in `generate`,
    which in that case passes no position ids."""
    network: Any = model
    if not any(hasattr(part, POSITION_IDS_METHOD) for part in model.modules()):
        return False
    ids = torch.ones(1, 1, dtype=torch.long, device=model.device)
    made = network.prepare_inputs_for_generation(ids, position_ids=ids, is_first_iteration=True)
    return made.get("position_ids") is None


def install_row_positions(model: PreTrainedModel) -> None:
    """Replace the modules of a twin that count from the batch's longest sequence by modules that
    use each sequence's own positions."""
    counts = model.config.is_encoder_decoder or not takes_positions(model)
    decoder: Any = model.get_decoder() if counts else nn.Module()
    for part in list(decoder.modules()):
        table = getattr(part, "embed_positions", None)
        if isinstance(table, nn.Embedding) or counts_from_padding(table):
            part.embed_positions = RowPositionEmbedding(table)
    for part in list(model.modules()):
        for name, buffer in part._buffers.items():
            if buffer is not None and is_causal_table(buffer):
                vars(part)[name] = RowCausalTable(buffer)
        if getattr(part, "attn_temperature_tuning", False) and not getattr(part, "use_rope", True):
            scaled: Any = part
            scaled.q_proj = RowQueryScale(scaled.q_proj, scaled.floor_scale, scaled.attn_scale)
            scaled.attn_temperature_tuning = False


def counts_from_padding(table: Any) -> bool:
    """Return whether `table` is a position embedding that counts from the padding id (M2M100)."""
    counted = hasattr(table, POSITION_IDS_METHOD)
    return counted and isinstance(getattr(table, "weights", None), Tensor)


def is_causal_table(x: Tensor) -> bool:
    """Return whether x is a boolean causal mask `[1, 1, N, N]`."""
    return x.dtype == torch.bool and x.ndim == 4 and x.shape[2] == x.shape[3]


class RowPositionEmbedding(nn.Module):
    """Position embeddings at each sequence's own positions, in place of a decoder's `table`.
    Padding positions beyond the end of the table get the table's last entry.

    If the table counts from the padding id, the first position is padding id + 1, and a padding
    token gets the embedding of padding at any position, as if `generate` ran token by token.
    """

    def __init__(self, table: Any) -> None:
        super().__init__()
        self.table = table
        self.padding = table.padding_idx if counts_from_padding(table) else None
        self.first = getattr(table, "offset", 0) if self.padding is None else self.padding + 1
        self.eval()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        cache = FORWARD_CONTEXT.get().cache
        if cache is None:
            return self.table(*args, **kwargs)
        position_ids = cache.positions + self.first
        weight = self.table.weight if self.padding is None else self.table.weights
        position_ids = position_ids.clamp(max=len(weight) - 1)
        if self.padding is not None:
            ids = args[0] if args else kwargs["input_ids"]
            if ids is not None:  # None: embeddings of a prompt with an image
                position_ids = torch.where(ids == self.padding, self.padding, position_ids)
        return F.embedding(position_ids, weight)


class RowCausalTable:
    """A causal mask `[1, 1, N, N]` that returns each sequence's own part when a family's code
    slices it by the positions of the longest sequence."""

    def __init__(self, table: Tensor) -> None:
        self.table = table

    def __getitem__(self, cut: Any) -> Tensor:
        cache = FORWARD_CONTEXT.get().cache
        if cache is None:
            return self.table[cut]
        visible = self.table[0, 0, :, : cache.end]
        visible = visible[cache.positions.clamp(max=len(visible) - 1)][:, None]  # [B, 1, q, K]
        return F.pad(visible, (0, cache.end - visible.shape[-1]))  # keys of padding tokens


class RowQueryScale(nn.Module):
    """The query projection of a layer without rotary embeddings, scaled by each sequence's own
    positions. Llama 4's code scales by the positions of the longest sequence instead."""

    def __init__(self, queries: nn.Module, floor: float, scale: float) -> None:
        super().__init__()
        self.queries, self.floor, self.scale = queries, floor, scale
        self.eval()

    def forward(self, states: Tensor) -> Tensor:
        queries, positions = self.queries(states), FORWARD_CONTEXT.get().cache.positions
        scales = torch.log1p(torch.floor((positions.float() + 1.0) / self.floor)) * self.scale + 1.0
        return (queries * scales[..., None]).to(queries.dtype)
