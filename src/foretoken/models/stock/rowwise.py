"""A Model row by row, each over the cache that transformers makes for it, whatever that
keeps: keys and values, recurrent states, or nothing.

Passes are prepared as `generate` prepares them, so that each family runs by its own code, its own
attention and its own positions. A row goes back by cropping a cache of keys and values that only
grow; any other is replaced by a copy from before the block, and accepted tokens behind that are
read again with the next block. It does not know how tokens are chosen.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field, replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, EncoderDecoderCache, GenerationConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.generation.configuration_utils import GenerationMode

from foretoken.errors import RefusedError
from foretoken.media.inputs import ENCODED, Media
from foretoken.models.base import Blocks, Capabilities
from foretoken.models.row_slots import check_lengths, check_room, check_sources
from foretoken.models.stock.attention import twin
from foretoken.models.stock.cache import INSTEAD, no_writer
from foretoken.models.stock.media import (
    accepted_by,
    continued,
    encoded,
    encoder_key,
    first_pass,
    handed_over,
    stand_in,
    writer,
)
from foretoken.models.stock.model import TorchModel
from foretoken.models.stock.selfcheck import Form, forward

# Names that families have for what they keep of a text, in the output and as an argument
CACHES = {name: name for name in ("past_key_values", "cache_params", "state", "cache")}
CACHES |= {"past_buckets_states": "past_key_values", "mems": "past_key_values"}
STATES = 20  # copies of a row's state: a draft goes back over as many passes as it made
APPENDS = {"DynamicLayer", "DummyLayer"}  # layers that can be cropped to any length
Kept = dict[str, Any]  # a cache by the name that the forward has for it; {}: nothing is kept


@dataclass(slots=True)
class OwnRow:
    """A row: its tokens, what the model keeps of the first `read` of them, and earlier states."""

    text: list[int]
    source: dict[str, Any]  # the encoder's output, by its name as an argument of a forward
    media: Media | None = None  # that a decoder reads
    read: int = 0
    kept: Kept = field(default_factory=Kept)
    # `read` and a copy of `kept` before each block since the last rollback
    earlier: list[tuple[int, Kept]] = field(default_factory=list[tuple[int, Kept]])
    handed: Kept = field(default_factory=Kept)  # as every pass is given its source or media
    positions: Tensor | None = None  # of its prompt with media

    def fork(self) -> OwnRow:
        """Return a row of the same text, with a cache of its own."""
        earlier = [(n, duplicate(kept)) for n, kept in self.earlier]
        return replace(self, text=[*self.text], kept=duplicate(self.kept), earlier=earlier)

    def mark(self) -> None:
        """Keep the state from before a block, where a crop could not bring it back."""
        if self.kept and not croppable(self.kept):
            if not self.earlier or self.earlier[-1][0] != self.read:
                self.earlier.append((self.read, duplicate(self.kept)))
                del self.earlier[:-STATES]

    def back(self, length: int) -> None:
        """Go back to `length` tokens. Where no state of so many is kept, the tokens behind the last
        one before are read again with the next block."""
        del self.text[length:]
        if self.read > length and croppable(self.kept):
            crop(self.kept, self.read - length)
            self.read = length
        elif self.read > length:
            before = [each for each in self.earlier if each[0] <= length]
            self.read, kept = before[-1] if before else (0, Kept())
            self.kept = duplicate(kept)
        self.earlier = [each for each in self.earlier if each[0] <= self.read][-1:]


class RowwiseModel(TorchModel):
    """Runs a twin of `model`, a network of transformers that generates text from ids, in evaluation
    mode, one row at a time."""

    runtime = "transformers, row by row"
    capabilities = Capabilities(media=True)

    def __init__(self, model: PreTrainedModel) -> None:
        admit(writer(model))
        super().__init__(model)
        self.network: Any = twin(self.model)
        self.rows: list[OwnRow] = []

    @property
    def lengths(self) -> list[int]:
        return [len(row.text) for row in self.rows]

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        media, self.joining_media = self.joining_media or [None] * len(prompts), []
        if not prompts:
            return
        if self.encoder_decoder and not all(media):
            check_sources(prompts, sources, self.source_context)
        check_room([0] * len(prompts), [len(prompt) for prompt in prompts], self.context)
        if not self.rows:
            self.network = twin(self.model)  # which may have changed since
        fresh = [
            OwnRow(
                [],
                self._encoded(sources[b], media[b]) if sources else {},
                None if sources else media[b],
            )
            for b in range(len(prompts))
        ]
        for row, prompt in zip(fresh, prompts, strict=True):
            self._extend(row, prompt, 0)
        self.rows = self.rows + fresh

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_room(self.lengths, [len(b) for b in blocks], self.context)
        shape = len(blocks), max(need, default=0), self.vocab_size
        logits = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        for b, (row, block, n) in enumerate(zip(self.rows, blocks, need, strict=True)):
            row.mark()
            for at, some in self._extend(row, block, n):
                logits[b, at : at + len(some)] = some
        return logits

    @torch.inference_mode()
    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            row.back(length)

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        old, self.rows = self.rows, []
        for b, row in enumerate(rows):
            self.rows.append(old[row].fork() if row in rows[:b] else old[row])

    @cached_property
    def encoder_key(self) -> str:
        return encoder_key(self.model)

    def _encoded(self, source: list[int], media: Media | None) -> dict[str, Any]:
        start = perf_counter()
        if media is None and self.needs_media:
            media = Media([], {ENCODED: stand_in(self.network, source)})
        if media is None:
            ids = {"input_ids": torch.tensor([source], device=self.device)}
            return {ENCODED: encoded(self.network, Media([], ids))}
        output = encoded(self.network, media, self.encoder_key, self.whole)
        self.encoder_seconds += perf_counter() - start
        given = media.fitted(0, self.model.dtype, self.device)
        masks = {n: given[n] for n in ("attention_mask",) if n in given}  # as `generate` passes it
        return {ENCODED: output, **masks}

    def _extend(self, row: OwnRow, block: list[int], need: int) -> list[tuple[int, Tensor]]:
        """Read a block behind a row. Returns the logits of its last `need` tokens, by parts, each
        with the number of those before it."""
        row.text += block
        first, at = len(row.text) - need, row.read
        parts: list[tuple[int, Tensor]] = []
        for end in self._ends(row, first) if block else ():
            if end == len(row.text):
                row.mark()
            wanted = end - max(first, at)
            logits = self._forward(row, end, max(1, wanted))
            if wanted > 0:
                parts.append((end - wanted - first, logits))
            at = end
        return parts

    def _ends(self, row: OwnRow, first: int) -> list[int]:
        """Where the passes end that read a row, whose logits are needed from `first` on.

        A state is to be kept right before the tokens that may be rejected, else all that is read
        with them is read again after each rejection.
        """
        at, length = row.read, len(row.text)
        need = length - first
        apart = need > 1 and at < first and (at == 0 or first - at > need)
        return [first, length] if apart else [length]

    def _forward(self, row: OwnRow, end: int, wanted: int) -> Tensor:
        """Read a row up to `end`; logits `[wanted, V]` of the last tokens."""
        kept = row.kept or fresh_cache(self.model)
        text = torch.tensor([row.text[:end]], device=self.device)
        given = self._given(row, text)
        if row.media is not None and not row.read:
            inputs = first_pass(self.network, text, given) | kept
            row.positions = inputs.get("position_ids")
        else:
            inputs = prepared(self.network, text, row.read, {**given, **kept}, wanted)
            if row.positions is not None:
                inputs["position_ids"] = continued(row.positions, end)[..., row.read :]
        output = self.network(**inputs, return_dict=True)
        row.kept = next(({CACHES[n]: output[n]} for n in CACHES if output.get(n) is not None), {})
        row.read = end if row.kept else 0
        return output.logits[0, -wanted:]

    def _given(self, row: OwnRow, text: Tensor) -> Kept:
        """Return a row's source or media as `generate` gives them to the preparation of every
        pass."""
        if row.source and not row.read:
            row.handed = copy.deepcopy(row.source)  # some families add to an encoder's states
        elif row.media is not None and (self.whole is self.model or not row.read):
            fitted = row.media.fitted(text.shape[1], self.model.dtype, self.device)
            row.handed = handed_over(self.whole, text, fitted)
        return row.handed


def prepared(
    network: Any, text: Tensor, read: int, kept: dict[str, Any], wanted: int
) -> dict[str, Any]:
    """Return a forward's arguments as `generate` makes them, for text `[1, n]` of which `read`
    tokens are in the cache, and logits of `wanted` tokens."""
    accepted = accepted_by(type(network))
    given: dict[str, Any] = {"use_cache": True, "attention_mask": None, **kept}
    if "logits_to_keep" in accepted:
        given["logits_to_keep"] = wanted
    if "position_ids" in accepted and not network.config.is_encoder_decoder:
        given["position_ids"] = network._prepare_position_ids_for_generation(text, {})
    return network.prepare_inputs_for_generation(
        text,
        next_sequence_length=text.shape[1] - read if read else None,
        is_first_iteration=read == 0,
        **given,
    )


def fresh_cache(model: PreTrainedModel) -> Kept:
    """The empty cache that `generate` would begin with; {} for families that make their own."""
    network: Any = model
    given = Kept()
    settings, mode = GenerationConfig(), GenerationMode.GREEDY_SEARCH
    network._prepare_cache_for_generation(settings, given, mode, 1, 0)
    return {name: cache for name, cache in given.items() if name in accepted_by(type(model))}


def croppable(kept: Kept) -> bool:
    """Tell whether all that is kept are keys and values, each of its token alone: layers that
    attend to a picture keep another number."""
    parts: list[Any] = [getattr(cache, "self_attention_cache", cache) for cache in kept.values()]
    for part in parts:
        if type(part) is not DynamicCache:
            return False
        layers: list[Any] = part.layers
        keys = [x.keys for x in layers if getattr(x, "keys", None) is not None]
        if not {type(x).__name__ for x in layers} <= APPENDS or len({*map(_slots, keys)}) > 1:
            return False
    return bool(kept)


def _slots(keys: Tensor) -> int:
    return keys.shape[-2] if keys.ndim > 1 else 0


def crop(kept: Kept, tokens: int) -> None:
    """Drop the last tokens, so many; there may be more before them than a text has. The next pass
    copies what is left."""
    for cache in kept.values():
        for layer in getattr(cache, "self_attention_cache", cache).layers:
            if getattr(layer, "is_initialized", False):
                layer.keys = layer.keys[..., :-tokens, :]
                layer.values = layer.values[..., :-tokens, :]


def duplicate(kept: Kept) -> Kept:
    """Copy what is kept, but for keys and values, which no pass changes: it makes new ones."""
    same: dict[int, Any] = {}
    for cache in kept.values():
        for part in _parts(cache):
            for layer in getattr(part, "layers", ()):
                if isinstance(layer, DynamicLayer):
                    same |= {id(x): x for x in (layer.keys, layer.values) if x is not None}
    return copy.deepcopy(kept, same)


@torch.inference_mode()
def read_whole(model: PreTrainedModel, text: Tensor, source: Tensor | None, need: int) -> Tensor:
    """The logits that `generate` makes of a prompt `[1, n]`, for each of its last `need` tokens by
    the text up to it: a `Whole` for the self-check."""
    if source is not None:  # a decoder's text is prepared as any
        return forward(model, text, source, need)
    network: Any = model
    ends = range(text.shape[1] - need + 1, text.shape[1] + 1)
    inputs = [prepared(network, text[:, :end], 0, {}, 1) | {"use_cache": False} for end in ends]
    return torch.cat([network(**each, return_dict=True).logits[0, -1:] for each in inputs])


def _parts(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def admit(model: PreTrainedModel) -> None:
    """Raise RefusedError for a model that does not write text from ids."""
    reason = no_writer(model)
    if reason:
        name = f"{model.config.model_type} ({type(model).__name__})"
        raise RefusedError(f"{name} cannot be run exactly: {reason}; {INSTEAD}")


SINGLE_TOKENS = "at most it scores single tokens a pass, so that drafts save nothing"
BY_ROW = Form(
    "a cache of each row",
    RowwiseModel,
    instead=f"{SINGLE_TOKENS}; {INSTEAD}",
    admit=admit,
    whole=read_whole,
    costs="each sequence of a batch takes a pass of its own",
)
