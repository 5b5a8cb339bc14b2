"""Encoder-decoders on the native kernels, as Models: the encoder's states become keys and values of
each row's source, once. An encoder of sounds or pictures is transformers' own, on torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.media.inputs import ENCODED, Media, objection_of_size
from foretoken.models.native.media import every_torch_thread, stock_media
from foretoken.models.native.model import NativeModel
from foretoken.models.native.pages import PAGE, PagedRow, PagePool
from foretoken.models.native.passes import NativePasses, RowPart
from foretoken.models.rows import check_room, check_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class HandedStates:
    """Encoders' states of the last sources, by encoder and source, for another model to take
    once."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[int, Tensor]] = OrderedDict()

    def put(self, key: Hashable, owner: object, states: Tensor) -> None:
        self._known[key] = id(owner), states
        while len(self._known) > MOST_HANDED:
            self._known.popitem(last=False)

    def take(self, key: Hashable, taker: object) -> Tensor | None:
        """Return and forget these states, if another one made them."""
        owner, states = self._known.get(key, (id(taker), None))
        if owner == id(taker):
            return None
        self._known.pop(key, None)
        return states


HANDED, MOST_HANDED = HandedStates(), 32


class NativeEncoderDecoder(NativeModel):
    """A decoder that attends to what the encoder makes of each row's source."""

    capabilities = replace(NativeModel.capabilities, prefix_cache=False)  # keys are of a source
    encoder_decoder = True

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        super().__init__(passes, facts)
        self.encoder, self.crossing = passes.encoder(), passes.crossing()
        self.source_context = facts["source_context"]
        self.source_vocab_size = facts["source_vocab_size"]
        self.sources = PagePool(self.crossing.layout, self.pool.dtype.name)
        self.handed_key: str | None = passes.facts["encoder_key"]
        self._joining: list[PagedRow] = []  # sources of the rows that are about to join

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        pages = sum(-(-n // PAGE) for n in sources)
        return super().memory(lengths, []) + self.sources.bytes * pages

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not prompts:
            return
        check_room([0] * len(prompts), [len(p) for p in prompts], self.context)
        start = perf_counter()
        states = self._states(prompts, sources)
        self.encoder_seconds += perf_counter() - start
        self._joining = self._crossed(states)
        super().start(prompts)

    def _states(self, prompts: list[list[int]], sources: list[list[int]] | None) -> list[Tensor]:
        """Return the encoder's states of each source, `[n, H]`. States that another model with the
        same encoder has just made are taken: a draft joins after its target."""
        check_sources(prompts, sources, self.source_context)
        assert sources is not None
        made = [HANDED.take((self.handed_key, tuple(source)), self) for source in sources]
        new = [source for source, states in zip(sources, made, strict=True) if states is None]
        fresh = iter(self._encoded(new) if new else [])
        states = [next(fresh) if one is None else one for one in made]
        for source, one, known in zip(sources, states, made, strict=True):
            if known is None:
                HANDED.put((self.handed_key, tuple(source)), self, one)
        return states

    def _encoded(self, sources: list[list[int]]) -> list[Tensor]:
        """Run the encoder; it reads each source in one pass."""
        assert self.encoder is not None
        self.encoder.fit(max(map(len, sources)))
        pool = PagePool(self.encoder.layout, self.pool.dtype.name)  # until the next layer
        made, some = list[Tensor](), list[RowPart]()
        for source in sources:
            if sum(len(part.tokens) for part in some) + len(source) > self.encoder.most:
                made += _shown(self.encoder, some)
                some = []
            some.append(RowPart(PagedRow(pool), 0, source, 0, 0))
        return made + _shown(self.encoder, some)

    def _crossed(self, states: list[Tensor]) -> list[PagedRow]:
        """Return the keys and values that the decoder reads of sources with these states."""
        rows = [PagedRow(self.sources) for _ in states]
        parts = [
            RowPart(row, 0, [0] * len(each), 0, 0) for row, each in zip(rows, states, strict=True)
        ]
        self.crossing.given = torch.cat(states).float().contiguous()
        self.crossing.run(parts, 0, 0, shows=False)
        for row, each in zip(rows, states, strict=True):
            row.length = len(each)
        return rows

    @property
    def hidden(self) -> Tensor:
        factor = self.passes.facts["logit_factor"]  # T5's, of what the head reads
        return super().hidden if factor == 1 else super().hidden * factor

    def _fresh(self, count: int) -> list[PagedRow]:
        sources, self._joining = self._joining, []
        return [PagedRow(self.pool, source=source) for source in sources]

    def permute(self, rows: list[int]) -> None:
        super().permute(rows)
        if not rows:
            self.sources.recount()


class NativeMediaDecoder(NativeEncoderDecoder):
    """The same, whose encoder reads sounds or pictures of one size, on torch.

    network: Loads the model, whose encoder it is, when that is first needed: a draft that shares
    the target's states never needs its own.
    """

    capabilities = replace(NativeEncoderDecoder.capabilities, media=True)
    needs_media = True

    def __init__(
        self, passes: NativePasses, facts: dict[str, Any], network: Callable[[], PreTrainedModel]
    ) -> None:
        super().__init__(passes, facts)
        self.attached: list[Media | None] = []
        hears = facts["hears"]
        self.input: str = hears["input"]
        self.shape, self.width = tuple(hears["shape"]), tuple(hears["states"])
        self.encoder_key = hears["key"]
        self._load = network

    @cached_property
    def _network(self) -> PreTrainedModel:
        return self._load().float().eval()

    def objection(self, media: Media) -> str | None:
        return objection_of_size(media, self.input, self.shape)

    def _states(self, prompts: list[list[int]], sources: list[list[int]] | None) -> list[Tensor]:
        media, self.attached = self.attached or [None] * len(prompts), []
        return [self._heard(one) for one in media]

    @torch.inference_mode()
    def _heard(self, media: Media | None) -> Tensor:
        """The encoder's states of media, `[S, H]`, or random ones, by which passes are measured."""
        if media is None:
            return torch.randn(self.width, generator=torch.Generator().manual_seed(0))
        if ENCODED in media.inputs:
            return media.inputs[ENCODED].float()[0]
        key = self.encoder_key or ""
        known = media.encoded.get(key)
        if known is not None:
            return known[0].float()[0]
        with every_torch_thread():
            return stock_media().heard(self._network, media, key).float()[0]


def _shown(encoder: NativePasses, parts: list[RowPart]) -> list[Tensor]:
    states = encoder.run(parts, 0, 0, shows=True).shown
    assert states is not None
    return list(states.split([len(part.tokens) for part in parts]))
