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
    """The decoder layers of the twin `model` over `cache`, compiled within `activate`."""

    def __init__(self, model: PreTrainedModel, cache: RaggedCache) -> None:
        self.cache, self.active, self.refusal = cache, False, "it has no layers of a known kind"
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

    def _run(
        self, forward: Callable[..., Any], part: nn.Module, index: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.active or self.refusal:
            return forward(part, *args, **kwargs)
        cache = self.cache
        cache_names = [name for name, value in kwargs.items() if value is cache]
        others = {name: value for name, value in kwargs.items() if name not in cache_names}
        k, v = (x[: len(cache.row)] for x in cache.layers[index].arrays)
        cache_arguments = (k, v), cache.row, cache.positions, cache.end
        try:
            with (
                limits.patch(recompile_limit=MAX_RECOMPILES),
                SHAPE_CONFIG.patch(use_duck_shape=False),
            ):
                return self.compiled(forward, part, cache_arguments, cache_names, args, others)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # torch raises many kinds, also if there is no compiler
            cause = getattr(error, "inner_exception", error)
            self.refuse(f"{log_error_kind(cause)}: {to_one_line(cause)}")
            return forward(part, *args, **kwargs)


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
