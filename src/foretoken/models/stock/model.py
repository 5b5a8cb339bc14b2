"""What decoder-only and encoder-decoder models have in common: the Model protocol over a ragged
cache, by transformers' own code.

Blocks of different lengths are padded on the right and run as one batch; only the positions that
are needed go through the output layer. It does not know how tokens are chosen.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.models.base import Blocks, Tree, counts_of
from foretoken.models.places import most_slots
from foretoken.models.rows import check_lengths, check_room, padded, staying
from foretoken.models.stock.attention import Forward
from foretoken.models.stock.cache import BUCKET, given
from foretoken.models.stock.longrope import switch_of
from foretoken.models.stock.needed import Needed
from foretoken.models.stock.sizes import context_limit, no_logits, output_rows, positions


class StockModel(ABC):
    """Runs a twin of `model`, without dropout; the model itself stays as it is."""

    runtime = "transformers"
    encoder_decoder: bool
    source_context: int | None = None
    source_vocab_size: int | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self.device = model.device
        self.computed = str(model.dtype).removeprefix("torch.")
        self.takes_tensors = self.device.type != "cpu"
        self.context: int | None = context_limit(model.config.get_text_config(decoder=True))
        self.longest = self.context if switch_of(model) is None else positions(model)
        self._beyond = False
        self.vocab_size = output_rows(model)
        self.running = Forward(model)
        self.cache: Any = self._empty()  # RaggedCache, or CrossCache over one
        self.padding = 0
        self._hidden: Tensor | None = None

    @abstractmethod
    def _empty(self) -> Any:
        """A cache without rows."""

    @abstractmethod
    def read(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> Any:
        """A cache of its own with all of `prompts`."""

    @abstractmethod
    def _inputs(self, ids: Tensor, cache: Any) -> dict[str, Any]:
        """What the forward takes for new tokens `ids`, by place, beside the cache itself."""

    @property
    def hidden(self) -> Tensor:
        assert self._hidden is not None, "no output layer has run"
        return self._hidden

    @torch.inference_mode()
    def memory(self, lengths: list[int], sources: list[int]) -> int:
        slot, cross = self._slot_bytes
        return slot * most_slots(lengths, BUCKET) + cross * most_slots(sources, BUCKET)

    @cached_property
    def _slot_bytes(self) -> tuple[int, int]:
        """Of a token and of one of its source."""
        cache = self.read([[0]], [[0]] if self.encoder_decoder else None)
        return cache.decoder.slot_bytes, cache.cross.slot_bytes if self.encoder_decoder else 0

    @property
    def lengths(self) -> list[int]:
        return self.cache.decoder.lengths

    @property
    def long(self) -> list[bool]:
        return self.cache.decoder.long

    def beyond(self, on: bool) -> None:
        self._beyond = on

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not prompts:
            return
        if self.lengths:
            self.cache.join(self.read(prompts, sources))
        else:
            self.running.renew()
            self.cache = self.read(prompts, sources)

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        return self._run(self.cache, blocks, need)

    @torch.inference_mode()
    def score_tree(self, blocks: list[list[int]], tree: Tree) -> Tensor:
        return self._run(self.cache, blocks, [len(block) for block in blocks], tree)

    @torch.inference_mode()
    def keep(self, slots: list[list[int]]) -> None:
        self.cache.decoder.keep(slots)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self.cache.decoder.lengths = list(lengths)

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        if rows:
            self.cache.select(rows)
        else:  # an idle model keeps no memory
            self.cache = self._empty()

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.lengths), rows))

    def _run(self, cache: Any, blocks: Blocks, need: list[int], tree: Tree | None = None) -> Tensor:
        ragged, counts = cache.decoder, counts_of(blocks, need)
        limits = [self.longest if long else self.context for long in ragged.long]
        check_room(ragged.lengths, counts, None if tree else limits)
        if not any(counts):
            return no_logits(self.model, len(counts))
        ids = padded(blocks, self.device)
        cache.prepare(ids.shape[1], tree)
        ids = ragged.placed(ids)
        self.padding = ids.numel() - sum(counts)
        needed = Needed(counts, need, ragged.places, self.device)
        with self.running(ragged, needed) as model:
            logits = model(
                **self._inputs(ids, cache),
                **given(self.model, cache),
                use_cache=True,
                return_dict=True,
            ).logits
        ragged.advance(counts)
        self._hidden = needed.hidden
        return needed.logits(logits)
