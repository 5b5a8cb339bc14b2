"""Long rope (Phi-3, Phi-4-mini, PhiMoE): texts of up to N tokens are read with one set of rotary
factors, longer ones with another, all of their tokens.

transformers' `generate` reads a text again when it outgrows N. Here a row says for itself which
set it is read with, so that rows of both kinds share a pass: `BEYOND` is added to the position ids
of a long one. It does not know caches, nor who starts the rows again.
"""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.models.rows import BEYOND


def switch_of(model: PreTrainedModel) -> int | None:
    """N, for a model whose `generate` reads a longer text again; else None.

    Families with long rope whose `generate` keeps the short factors of what it has read are not
    among them: there a text of more than N tokens depends on how long its prompt was.
    """
    config = model.config.get_text_config(decoder=True)
    length = getattr(config, "original_max_position_embeddings", None)
    limit = getattr(config, "max_position_embeddings", None)
    if not (_is_long(config) and isinstance(length, int) and isinstance(limit, int)):
        return None
    return length if length < limit and _reads_again(model) else None


def give_both(model: PreTrainedModel) -> None:
    """Let the rotary parts of a twin serve rows on either side of its switch."""
    length = switch_of(model)
    if length is None:
        return
    for part in list(model.modules()):
        for name, child in list(part.named_children()):
            config = getattr(child, "config", None)
            if isinstance(config, PreTrainedConfig) and hasattr(child, "rope_type"):
                if _is_long(config):
                    setattr(part, name, BothFactors(child, length))


class BothFactors(nn.Module):
    """Rotary embeddings by the short factors, and by the long ones where `BEYOND` is added to the
    positions. `rotary` is transformers' part, which takes the set that its longest text needs."""

    def __init__(self, rotary: nn.Module, length: int) -> None:
        super().__init__()
        self.length = length
        self.short, self.long = (_settled(rotary, at) for at in (0, length))
        self.embed: Any = inspect.unwrap(type(rotary).forward)  # without the search for the longest
        self.eval()

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        long = position_ids >= BEYOND
        near = position_ids.clamp(max=self.length - 1)
        # one more position, as some families look for the longest themselves
        far = torch.where(long, position_ids - BEYOND, 0)
        far = torch.cat([far, torch.full_like(far[:, :1], self.length)], 1)
        short, beyond = self.embed(self.short, x, near), self.embed(self.long, x, far)
        cos, sin = (
            torch.where(long[..., None], b[:, :-1], s) for s, b in zip(short, beyond, strict=True)
        )
        return cos, sin


def _settled(rotary: nn.Module, position: int) -> nn.Module:
    """A copy with the factors of a text that ends at this position."""
    settled = copy.deepcopy(rotary)
    device = next(settled.buffers()).device
    settled(torch.zeros(1, device=device), torch.tensor([[position]], device=device))
    return settled


def _reads_again(model: PreTrainedModel) -> bool:
    """Tell whether `generate` reads all of a text that gets to the length at which the factors
    change.

    What prepares its passes then drops the cache and asks for the whole text; Phi-4-multimodal's
    only drops the cache, and its `generate` goes on from the last token alone.
    """
    prepares = getattr(type(model), "prepare_inputs_for_generation", None)
    code = getattr(inspect.unwrap(prepares) if prepares else None, "__code__", None)
    if code is None or "original_max_position_embeddings" not in code.co_names:
        return False
    return "next_sequence_length" in code.co_consts


def _is_long(config: PreTrainedConfig) -> bool:
    return (getattr(config, "rope_parameters", None) or {}).get("rope_type") == "longrope"
