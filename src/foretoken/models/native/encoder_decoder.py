"""Encoder-decoders on the native kernels, as Models. The keys and values of cross-attention are
computed once per sequence. Encoders of images and audio are transformers' own and run on torch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from foretoken.media.inputs import ENCODER_OUTPUTS, Media, find_size_problem
from foretoken.models.native.media import import_stock_media, use_all_torch_threads
from foretoken.models.native.model import NativeModel
from foretoken.models.native.pages import PAGE_POSITIONS, PagedSequence, PagePool
from foretoken.models.native.passes import NativePasses, SequencePart
from foretoken.models.row_slots import check_room, check_sources

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class EncoderStateHandoff:
    """Hidden states of recently encoded sources, passed from a target to a draft model with the
    same encoder, so that the draft model need not encode them. Each entry can be taken once."""

    def __init__(self) -> None:
        self._known: OrderedDict[Hashable, tuple[int, Tensor]] = OrderedDict()

    def put(self, key: Hashable, owner: object, states: Tensor) -> None:
        self._known[key] = id(owner), states
        while len(self._known) > MAX_HANDED_SOURCES:
            self._known.popitem(last=False)

    def take(self, key: Hashable, taker: object) -> Tensor | None:
        """Return and remove the states under this key. Returns None if there are none, or if
        `taker` itself put them here."""
        owner, states = self._known.get(key, (id(taker), None))
        if owner == id(taker):
            return None
        self._known.pop(key, None)
        return states


ENCODER_HANDOFF, MAX_HANDED_SOURCES = EncoderStateHandoff(), 32


class NativeEncoderDecoder(NativeModel):
    """An encoder, and a decoder with cross-attention to each sequence's source."""

    # a common prefix is not enough to share pages: keys and values also depend on the source
    capabilities = replace(NativeModel.capabilities, prefix_cache=False)
    encoder_decoder = True

    def __init__(self, passes: NativePasses, facts: dict[str, Any]) -> None:
        super().__init__(passes, facts)
        self.encoder, self.cross_kv = passes.open_encoder(), passes.open_cross_kv()
        self.source_context = facts["source_context"]
        self.source_vocab_size = facts["source_vocab_size"]
        self.source_pool = PagePool(self.cross_kv.layout, self.pool.dtype.name)
        self.handoff_key: str | None = passes.facts["encoder_key"]
        # cross-attention's keys and values of the sequences that join next
        self._joining_sources: list[PagedSequence] = []

    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        pages = sum(-(-n // PAGE_POSITIONS) for n in sources)
        return super().compute_cache_bytes(lengths, []) + self.source_pool.page_bytes * pages

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not prompts:
            return
        check_room([0] * len(prompts), [len(p) for p in prompts], self.context)
        start = perf_counter()
        states = self._encode_sources(prompts, sources)
        self.encoder_seconds += perf_counter() - start
        self._joining_sources = self._compute_cross_kv(states)
        super().start(prompts)

    def _encode_sources(
        self, prompts: list[list[int]], sources: list[list[int]] | None
    ) -> list[Tensor]:
        """Return the encoder's hidden states of each source, `[n, H]`. They are taken from the
        handoff if another model with the same encoder has put them there, as a target does before
        its draft model starts."""
        check_sources(prompts, sources, self.source_context)
        assert sources is not None
        made = [ENCODER_HANDOFF.take((self.handoff_key, tuple(source)), self) for source in sources]
        new = [source for source, states in zip(sources, made, strict=True) if states is None]
        fresh = iter(self._run_encoder(new) if new else [])
        states = [next(fresh) if one is None else one for one in made]
        for source, source_states, known in zip(sources, states, made, strict=True):
            if known is None:
                ENCODER_HANDOFF.put((self.handoff_key, tuple(source)), self, source_states)
        return states

    def _run_encoder(self, sources: list[list[int]]) -> list[Tensor]:
        """Return the encoder's hidden states of each source. A source is never split over two
        passes."""
        assert self.encoder is not None
        self.encoder.reserve_tokens(max(map(len, sources)))
        pool = PagePool(self.encoder.layout, self.pool.dtype.name)
        made, parts = list[Tensor](), list[SequencePart]()
        for source in sources:
            if sum(len(part.tokens) for part in parts) + len(source) > self.encoder.max_tokens:
                made += _run_encoder_parts(self.encoder, parts)
                parts = []
            parts.append(SequencePart(PagedSequence(pool), 0, source, 0, 0))
        return made + _run_encoder_parts(self.encoder, parts)

    def _compute_cross_kv(self, states: list[Tensor]) -> list[PagedSequence]:
        """Return the cross-attention keys and values of sources, given the encoder's hidden states
        of each."""
        seqs = [PagedSequence(self.source_pool) for _ in states]
        parts = [
            SequencePart(seq, 0, [0] * len(each), 0, 0)
            for seq, each in zip(seqs, states, strict=True)
        ]
        self.cross_kv.input_states = torch.cat(states).float().contiguous()
        self.cross_kv.run(parts, 0, 0, return_tapped=False)
        for seq, each in zip(seqs, states, strict=True):
            seq.length = len(each)
        return seqs

    @property
    def hidden(self) -> Tensor:
        factor = self.passes.facts["logit_factor"]  # T5 scales the head's input
        return super().hidden if factor == 1 else super().hidden * factor

    def _make_seqs(self, count: int) -> list[PagedSequence]:
        sources, self._joining_sources = self._joining_sources, []
        return [PagedSequence(self.pool, source=source) for source in sources]

    def permute(self, rows: list[int]) -> None:
        super().permute(rows)
        if not rows:
            self.source_pool.recount()


class NativeMediaDecoder(NativeEncoderDecoder):
    """An encoder-decoder whose encoder takes images or audio of one size and runs on torch.

    network: Loads transformers' model. It is called only when the encoder is first needed: a draft
    model that takes the target's hidden states never loads its own encoder.
    """

    capabilities = replace(NativeEncoderDecoder.capabilities, media=True)
    needs_media = True

    def __init__(
        self, passes: NativePasses, facts: dict[str, Any], network: Callable[[], PreTrainedModel]
    ) -> None:
        super().__init__(passes, facts)
        self.joining_media: list[Media | None] = []
        hears = facts["hears"]
        self.input: str = hears["input"]
        self.shape, self.width = tuple(hears["shape"]), tuple(hears["states"])
        self.encoder_key = hears["key"]
        self._load = network

    @cached_property
    def _network(self) -> PreTrainedModel:
        return self._load().float().eval()

    def find_media_problem(self, media: Media) -> str | None:
        return find_size_problem(media, self.input, self.shape)

    def _encode_sources(
        self, prompts: list[list[int]], sources: list[list[int]] | None
    ) -> list[Tensor]:
        media, self.joining_media = self.joining_media or [None] * len(prompts), []
        return [self._encode_media(one) for one in media]

    @torch.inference_mode()
    def _encode_media(self, media: Media | None) -> Tensor:
        """Return the encoder's hidden states of an image or audio, `[S, H]`. Without media, as when
        only the time is measured, return random states."""
        if media is None:
            return torch.randn(self.width, generator=torch.Generator().manual_seed(0))
        if ENCODER_OUTPUTS in media.inputs:
            return media.inputs[ENCODER_OUTPUTS].float()[0]
        key = self.encoder_key or ""
        known = media.encoded.get(key)
        if known is not None:
            return known[0].float()[0]
        with use_all_torch_threads():
            return import_stock_media().encode_without_padding(self._network, media, key).float()[0]


def _run_encoder_parts(encoder: NativePasses, parts: list[SequencePart]) -> list[Tensor]:
    states = encoder.run(parts, 0, 0, return_tapped=True).tapped_states
    assert states is not None
    return list(states.split([len(part.tokens) for part in parts]))
