"""A Model that runs one sequence per forward pass, over the cache that transformers makes for the
sequence: keys and values, recurrent states, or no cache.

Forward passes are prepared as `generate` prepares them, so that each family uses its own code,
attention and positions. If the cache consists of keys and values that grow by one per token, a
rollback crops the cache. Any other cache is replaced by a copy that was made before the block; the
accepted tokens that the copy lacks are recomputed together with the next block.
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
from foretoken.media.inputs import ENCODER_OUTPUTS, Media
from foretoken.models.base import Blocks, Capabilities
from foretoken.models.row_slots import check_lengths, check_room, check_sources
from foretoken.models.stock.attention import make_twin
from foretoken.models.stock.cache import ALTERNATIVES_HINT, find_generation_objection
from foretoken.models.stock.media import (
    capture_generate_arguments,
    compute_encoder_key,
    encode_media,
    extend_positions,
    get_forward_parameters,
    get_language_model,
    make_placeholder_states,
    prepare_first_forward,
)
from foretoken.models.stock.model import TorchModel
from foretoken.models.stock.selfcheck import CheckedBackend, run_reference

# The name of the cache in a model's output, and of the forward's parameter for it
CACHE_ARGUMENTS = {name: name for name in ("past_key_values", "cache_params", "state", "cache")}
CACHE_ARGUMENTS |= {"past_buckets_states": "past_key_values", "mems": "past_key_values"}
MAX_SNAPSHOTS = 20  # copies of a cache: a draft model may roll back all forward passes of a step
CROPPABLE_LAYERS = {"DynamicLayer", "DummyLayer"}  # layers that can be cropped to any length
CacheKwargs = dict[str, Any]  # caches by the name of the forward's parameter; {}: no cache


@dataclass(slots=True)
class RowwiseSequence:
    """A sequence: its tokens, the cache of its first `num_cached` tokens, and earlier copies of
    this cache."""

    token_ids: list[int]
    source: dict[str, Any]  # the encoder's output, by the forward's parameter name
    media: Media | None = None  # for a decoder-only model
    num_cached: int = 0
    caches: CacheKwargs = field(default_factory=CacheKwargs)
    # `num_cached` and a copy of `caches` before each block since the last rollback
    snapshots: list[tuple[int, CacheKwargs]] = field(default_factory=list[tuple[int, CacheKwargs]])
    # The source or media, as arguments for each forward pass
    generate_kwargs: CacheKwargs = field(default_factory=CacheKwargs)
    positions: Tensor | None = None  # position ids of a prompt with media

    def fork(self) -> RowwiseSequence:
        """Return a copy of the sequence with its own cache."""
        earlier = [(n, copy_cache(caches)) for n, caches in self.snapshots]
        return replace(
            self, token_ids=[*self.token_ids], caches=copy_cache(self.caches), snapshots=earlier
        )

    def save_snapshot(self) -> None:
        """Store a copy of the cache before a block is appended, if the cache cannot be cropped."""
        if self.caches and not is_croppable(self.caches):
            if not self.snapshots or self.snapshots[-1][0] != self.num_cached:
                self.snapshots.append((self.num_cached, copy_cache(self.caches)))
                del self.snapshots[:-MAX_SNAPSHOTS]

    def roll_back(self, length: int) -> None:
        """Roll back to `length` tokens. If the cache cannot be cropped, it is replaced by the
        latest snapshot of at most that length, and the next block recomputes the tokens after the
        snapshot."""
        del self.token_ids[length:]
        if self.num_cached > length and is_croppable(self.caches):
            crop(self.caches, self.num_cached - length)
            self.num_cached = length
        elif self.num_cached > length:
            before = [each for each in self.snapshots if each[0] <= length]
            self.num_cached, caches = before[-1] if before else (0, CacheKwargs())
            self.caches = copy_cache(caches)
        self.snapshots = [each for each in self.snapshots if each[0] <= self.num_cached][-1:]


class RowwiseModel(TorchModel):
    """A transformers model that generates tokens from ids, and that runs one sequence per forward
    pass. A twin of `model` in evaluation mode runs the forward passes."""

    runtime = "transformers, row by row"
    capabilities = Capabilities(media=True)

    def __init__(self, model: PreTrainedModel) -> None:
        admit(get_language_model(model))
        super().__init__(model)
        self.network: Any = make_twin(self.model)
        self.seqs: list[RowwiseSequence] = []

    @property
    def lengths(self) -> list[int]:
        return [len(seq.token_ids) for seq in self.seqs]

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        media, self.joining_media = self.joining_media or [None] * len(prompts), []
        if not prompts:
            return
        if self.encoder_decoder and not all(media):
            check_sources(prompts, sources, self.source_context)
        check_room([0] * len(prompts), [len(prompt) for prompt in prompts], self.context)
        if not self.seqs:
            self.network = make_twin(self.model)  # again, as the model may have changed
        fresh = [
            RowwiseSequence(
                [],
                self._encode_source(sources[b], media[b]) if sources else {},
                None if sources else media[b],
            )
            for b in range(len(prompts))
        ]
        for seq, prompt in zip(fresh, prompts, strict=True):
            self._extend(seq, prompt, 0)
        self.seqs = self.seqs + fresh

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_room(self.lengths, [len(b) for b in blocks], self.context)
        shape = len(blocks), max(need, default=0), self.vocab_size
        logits = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        for b, (seq, block, n) in enumerate(zip(self.seqs, blocks, need, strict=True)):
            seq.save_snapshot()
            for at, some in self._extend(seq, block, n):
                logits[b, at : at + len(some)] = some
        return logits

    @torch.inference_mode()
    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        for seq, length in zip(self.seqs, lengths, strict=True):
            seq.roll_back(length)

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        old, self.seqs = self.seqs, []
        for b, row in enumerate(rows):
            self.seqs.append(old[row].fork() if row in rows[:b] else old[row])

    @cached_property
    def encoder_key(self) -> str:
        return compute_encoder_key(self.model)

    def _encode_source(self, source: list[int], media: Media | None) -> dict[str, Any]:
        start = perf_counter()
        if media is None and self.needs_media:
            media = Media([], {ENCODER_OUTPUTS: make_placeholder_states(self.network, source)})
        if media is None:
            ids = {"input_ids": torch.tensor([source], device=self.device)}
            return {ENCODER_OUTPUTS: encode_media(self.network, Media([], ids))}
        output = encode_media(self.network, media, self.encoder_key, self.full_model)
        self.encoder_seconds += perf_counter() - start
        given = media.fit_inputs(0, self.model.dtype, self.device)
        masks = {n: given[n] for n in ("attention_mask",) if n in given}  # as in `generate`
        return {ENCODER_OUTPUTS: output, **masks}

    def _extend(
        self, seq: RowwiseSequence, block: list[int], need: int
    ) -> list[tuple[int, Tensor]]:
        """Append a block to a sequence. Returns the logits of the block's last `need` tokens in
        parts: for each part, the index of its first token among these `need` tokens, and its
        logits."""
        seq.token_ids += block
        first, at = len(seq.token_ids) - need, seq.num_cached
        parts: list[tuple[int, Tensor]] = []
        for end in self._plan_forward_ends(seq, first) if block else ():
            if end == len(seq.token_ids):
                seq.save_snapshot()
            num_logits = end - max(first, at)
            logits = self._forward(seq, end, max(1, num_logits))
            if num_logits > 0:
                parts.append((end - num_logits - first, logits))
            at = end
        return parts

    def _plan_forward_ends(self, seq: RowwiseSequence, first: int) -> list[int]:
        """Return the lengths at which the forward passes over a sequence's uncached tokens end.
        Logits are needed from position `first` on.

        A long part before the draft tokens gets its own forward pass, after which a snapshot is
        saved. Otherwise each rejection of draft tokens would recompute that part too.
        """
        at, length = seq.num_cached, len(seq.token_ids)
        need = length - first
        split = need > 1 and at < first and (at == 0 or first - at > need)
        return [first, length] if split else [length]

    def _forward(self, seq: RowwiseSequence, end: int, num_logits: int) -> Tensor:
        """Run a sequence's uncached tokens up to length `end`. Returns the logits `[num_logits, V]`
        of the last tokens."""
        caches = seq.caches or make_empty_cache(self.model)
        token_ids = torch.tensor([seq.token_ids[:end]], device=self.device)
        given = self._make_generate_kwargs(seq, token_ids)
        if seq.media is not None and not seq.num_cached:
            inputs = prepare_first_forward(self.network, token_ids, given) | caches
            seq.positions = inputs.get("position_ids")
        else:
            inputs = prepare_forward(
                self.network, token_ids, seq.num_cached, {**given, **caches}, num_logits
            )
            if seq.positions is not None:
                inputs["position_ids"] = extend_positions(seq.positions, end)[..., seq.num_cached :]
        output = self.network(**inputs, return_dict=True)
        seq.caches = next(
            ({CACHE_ARGUMENTS[n]: output[n]} for n in CACHE_ARGUMENTS if output.get(n) is not None),
            {},
        )
        seq.num_cached = end if seq.caches else 0
        return output.logits[0, -num_logits:]

    def _make_generate_kwargs(self, seq: RowwiseSequence, token_ids: Tensor) -> CacheKwargs:
        """Return a sequence's source or media in the form in which `generate` passes them to
        `prepare_inputs_for_generation`."""
        if seq.source and not seq.num_cached:
            # Copied, since some families add to the encoder's hidden states in place
            seq.generate_kwargs = copy.deepcopy(seq.source)
        elif seq.media is not None and (self.full_model is self.model or not seq.num_cached):
            fitted = seq.media.fit_inputs(token_ids.shape[1], self.model.dtype, self.device)
            seq.generate_kwargs = capture_generate_arguments(self.full_model, token_ids, fitted)
        return seq.generate_kwargs


def prepare_forward(
    network: Any, token_ids: Tensor, num_cached: int, caches: dict[str, Any], num_logits: int
) -> dict[str, Any]:
    """Return the arguments with which `generate` would call the forward, for tokens `[1, n]` of
    which the first `num_cached` are cached, with logits for the last `num_logits` tokens."""
    accepted = get_forward_parameters(type(network))
    arguments: dict[str, Any] = {"use_cache": True, "attention_mask": None, **caches}
    if "logits_to_keep" in accepted:
        arguments["logits_to_keep"] = num_logits
    if "position_ids" in accepted and not network.config.is_encoder_decoder:
        arguments["position_ids"] = network._prepare_position_ids_for_generation(token_ids, {})
    return network.prepare_inputs_for_generation(
        token_ids,
        next_sequence_length=token_ids.shape[1] - num_cached if num_cached else None,
        is_first_iteration=num_cached == 0,
        **arguments,
    )


def make_empty_cache(model: PreTrainedModel) -> CacheKwargs:
    """Return the empty cache with which `generate` starts, as an argument of the forward; {} for
    families that make their own cache."""
    network: Any = model
    given = CacheKwargs()
    settings, mode = GenerationConfig(), GenerationMode.GREEDY_SEARCH
    network._prepare_cache_for_generation(settings, given, mode, 1, 0)
    return {
        name: cache for name, cache in given.items() if name in get_forward_parameters(type(model))
    }


def is_croppable(caches: CacheKwargs) -> bool:
    """Return whether the caches hold only keys and values, with the same number of entries in all
    layers. Layers that attend to an image have another number of entries."""
    parts: list[Any] = [getattr(cache, "self_attention_cache", cache) for cache in caches.values()]
    for part in parts:
        if type(part) is not DynamicCache:
            return False
        layers: list[Any] = part.layers
        keys = [x.keys for x in layers if getattr(x, "keys", None) is not None]
        if (
            not {type(x).__name__ for x in layers} <= CROPPABLE_LAYERS
            or len({*map(_count_slots, keys)}) > 1
        ):
            return False
    return bool(caches)


def _count_slots(keys: Tensor) -> int:
    return keys.shape[-2] if keys.ndim > 1 else 0


def crop(caches: CacheKwargs, tokens: int) -> None:
    """Remove the last `tokens` entries of caches in place. Entries are counted from the end, since
    a cache may have more entries than the sequence has tokens."""
    for cache in caches.values():
        for layer in getattr(cache, "self_attention_cache", cache).layers:
            if getattr(layer, "is_initialized", False):
                layer.keys = layer.keys[..., :-tokens, :]
                layer.values = layer.values[..., :-tokens, :]


def copy_cache(caches: CacheKwargs) -> CacheKwargs:
    """Return a copy of caches. Keys and values of a DynamicLayer are not copied, since a forward
    pass makes new tensors of them instead of changing them in place."""
    same: dict[int, Any] = {}
    for cache in caches.values():
        for part in _list_caches(cache):
            for layer in getattr(part, "layers", ()):
                if isinstance(layer, DynamicLayer):
                    same |= {id(x): x for x in (layer.keys, layer.values) if x is not None}
    return copy.deepcopy(caches, same)


@torch.inference_mode()
def forward_as_generate(
    model: PreTrainedModel, token_ids: Tensor, source: Tensor | None, need: int
) -> Tensor:
    """Return the logits `[need, V]` of the last tokens of a prompt. For each of these tokens, a
    forward pass, prepared as in `generate`, runs over the prompt up to the token. This function is
    a `ReferenceForward` of the self-check.

    token_ids: `[1, n]`.
    """
    if source is not None:  # for an encoder-decoder, the preparation changes nothing
        return run_reference(model, token_ids, source, need)
    network: Any = model
    ends = range(token_ids.shape[1] - need + 1, token_ids.shape[1] + 1)
    inputs = [
        prepare_forward(network, token_ids[:, :end], 0, {}, 1) | {"use_cache": False}
        for end in ends
    ]
    return torch.cat([network(**each, return_dict=True).logits[0, -1:] for each in inputs])


def _list_caches(cache: Any) -> list[Any]:
    if isinstance(cache, EncoderDecoderCache):
        return [cache.self_attention_cache, cache.cross_attention_cache]
    return [cache]


def admit(model: PreTrainedModel) -> None:
    """Raise RefusedError for a model that cannot generate tokens from ids."""
    reason = find_generation_objection(model)
    if reason:
        name = f"{model.config.model_type} ({type(model).__name__})"
        raise RefusedError(f"{name} cannot be run exactly: {reason}; {ALTERNATIVES_HINT}")


# If an error contains this hint, `attach` leaves the model unchanged
SINGLE_TOKEN_HINT = (
    "it scores at most one token per forward pass, so speculative decoding saves nothing"
)
ROWWISE_BACKEND = CheckedBackend(
    "a cache per sequence",
    RowwiseModel,
    remedy=f"{SINGLE_TOKEN_HINT}; {ALTERNATIVES_HINT}",
    admit=admit,
    reference=forward_as_generate,
    cost_note="each sequence of a batch takes its own forward pass",
)
