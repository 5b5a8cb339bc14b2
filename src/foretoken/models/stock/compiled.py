"""Decoder layers compiled by torch: many small operations are fused into a few kernels.

All layers of a model share one compiled function, because each layer gets only its own arrays
instead of the whole cache. If compiling fails, the layers run uncompiled and a warning states why.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._dynamo import config as limits
from torch.fx.experimental import _config as symbols
from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from foretoken.errors import log_error_kind, to_one_line
from foretoken.models.stock.block_attention import (
    MAX_MASK_ENTRIES,
    VisibleBlocks,
    find_visible_blocks,
)
from foretoken.models.stock.cache import KeysValues, RaggedCache

COMPILE_BACKEND = "inductor"
# for all models together; each is compiled for one and for several sequences or tokens
MAX_RECOMPILES = 64

SHAPE_CONFIG: Any = symbols  # patched, so that torch does not assume that equal sizes stay equal

log = logging.getLogger(__name__)


class LayerCache:
    """One layer's part of the cache: its arrays, and the slots and positions at which new tokens
    are stored."""

    def __init__(self, arrays: KeysValues, row: Tensor, slots: Tensor, end: int) -> None:
        self.arrays, self.row, self.slots, self.end = arrays, row, slots, end

    def update(self, keys: Tensor, values: Tensor, *args: Any, **kwargs: Any) -> KeysValues:
        for x, new in zip(self.arrays, (keys, values), strict=True):
            x[self.row, :, self.slots] = new.transpose(1, 2)
        k, v = (x[:, :, : self.end] for x in self.arrays)
        return k, v


class CompiledLayers:
    """The decoder layers of the twin `model` over `cache`, compiled within `activate`. by_blocks:
    attention reads only the blocks that a sequence has; layers are then compiled for each batch
    size."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache, by_blocks: bool = False) -> None:
        self.cache, self.active, self.refusal = cache, False, "it has no layers of a known kind"
        self.by_blocks = by_blocks
        # results of `find_visible_blocks` in this forward pass, by id of the mask
        self.blocks_by_mask: dict[int, tuple[Tensor, VisibleBlocks]] = {}
        # whether these families take softcaps and sinks next to a mask that only hides keys
        parts = [part for part in model.modules() if isinstance(part, PreTrainedModel)]
        self.hides_only = all(part._supports_flex_attn for part in parts)
        self.compiled: Any = torch.compile(
            _run_layer, dynamic=True, fullgraph=True, backend=COMPILE_BACKEND
        )
        for part in model.modules():
            if isinstance(part, GradientCheckpointingLayer) and "forward" not in vars(part):
                own = {vars(x)["layer_idx"] for x in part.modules() if "layer_idx" in vars(x)}
                if len(own) == 1:
                    forward = inspect.unwrap(type(part).forward)
                    vars(part)["forward"] = partial(self._run, forward, part, own.pop())
                    self.refusal = ""

    def refuse(self, reason: str) -> None:
        """Stop running compiled layers, and log a warning with the reason."""
        self.refusal = reason
        log.warning("decoder layers run uncompiled: %s", reason)

    @contextmanager
    def activate(self) -> Iterator[None]:
        """Run compiled layers within this context."""
        self.active = True
        try:
            yield
        finally:
            self.active = False
            self.blocks_by_mask.clear()

    def _run(
        self, forward: Callable[..., Any], part: nn.Module, index: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.active or self.refusal:
            return forward(part, *args, **kwargs)
        cache = self.cache
        cache_names = [name for name, value in kwargs.items() if value is cache]
        others = {name: value for name, value in kwargs.items() if name not in cache_names}
        inputs = args
        if self.by_blocks:
            inputs = tuple(self._replace_mask("", value) for value in args)
            others = {name: self._replace_mask(name, value) for name, value in others.items()}
        k, v = (x[: len(cache.row)] for x in cache.layers[index].arrays)
        cache_arguments = (k, v), cache.row, cache.positions, cache.end
        try:
            with (
                # flex_attention takes a softcap only as a constant
                limits.patch(recompile_limit=MAX_RECOMPILES, specialize_float=self.by_blocks),
                SHAPE_CONFIG.patch(use_duck_shape=False),
            ):
                return self.compiled(forward, part, cache_arguments, cache_names, inputs, others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises many kinds, also if there is no compiler
            cause = getattr(error, "inner_exception", error)
            if self.by_blocks:
                self.by_blocks = False
                log.warning("attention reads all slots: %s", to_one_line(cause))
                return self._run(forward, part, index, *args, **kwargs)
            self.refuse(f"{log_error_kind(cause)}: {to_one_line(cause)}")
            return forward(part, *args, **kwargs)

    def _replace_mask(self, name: str, mask: Any) -> Any:
        """Return the visible blocks of a mask; other arguments of a layer are returned as is."""
        shape = len(self.cache.row), 1, self.cache.width, self.cache.end
        if not isinstance(mask, Tensor) or mask.shape != shape or mask.numel() > MAX_MASK_ENTRIES:
            return mask
        if mask.dtype != torch.bool and not (self.hides_only and name == "attention_mask"):
            return mask
        if id(mask) not in self.blocks_by_mask:
            self.blocks_by_mask[id(mask)] = mask, find_visible_blocks(mask)
        return self.blocks_by_mask[id(mask)][1]


def _run_layer(
    forward: Callable[..., Any],
    part: nn.Module,
    cache_arguments: tuple[KeysValues, Tensor, Tensor, int],
    cache_names: list[str],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    return forward(
        part, *args, **dict.fromkeys(cache_names, LayerCache(*cache_arguments)), **kwargs
    )
