"""A decoder-only transformers model behind the Model protocol."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.rows import BEYOND, CHUNK
from foretoken.models.stock.cache import INSTEAD, RaggedCache, admit, ragged_cache
from foretoken.models.stock.model import StockModel
from foretoken.transfer import sent


class CausalModel(StockModel):
    """Raises RefusedError where rows cannot be rolled back one by one."""

    encoder_decoder = False

    def __init__(self, model: PreTrainedModel) -> None:
        admit(model)
        accepted = inspect.signature(model.forward).parameters
        if model.config.is_encoder_decoder or "position_ids" not in accepted:
            name = type(model).__name__
            raise RefusedError(
                f"{name} takes no position_ids, so rows cannot differ in length; {INSTEAD}"
            )
        super().__init__(model)

    def _empty(self) -> RaggedCache:
        return ragged_cache(self.model, 0)

    @torch.inference_mode()
    def read(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> RaggedCache:
        fresh = ragged_cache(self.model, len(prompts))
        fresh.long = [self._beyond] * len(prompts)
        for at in range(0, max(map(len, prompts), default=0), CHUNK):
            self._run(fresh, [p[at : at + CHUNK] for p in prompts], [0] * len(prompts))
        return fresh

    def _inputs(self, ids: Tensor, cache: RaggedCache) -> dict[str, Any]:
        positions = cache.positions
        if self.longest is not None and cache.longest + cache.width > self.longest:
            positions = positions.clamp(max=self.longest - 1)  # padding only
        if any(cache.long):
            long = cache.placed(sent(torch.tensor(cache.long), self.device))
            positions = positions + BEYOND * long[:, None]
        return {"input_ids": ids, "position_ids": positions}
