"""Models that run transformers' own code over a ragged cache: decoder-only models, and
encoder-decoders, whose encoder runs once for each sequence, when the sequence joins.

Blocks of different lengths are padded on the right and run as one batch. Only the positions whose
logits are needed go through the output layer.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.media.inputs import ENCODER_OUTPUTS, Media
from foretoken.models.base import Blocks, Capabilities, Model, SharedKV, count_block_tokens
from foretoken.models.hidden_states import HiddenStates
from foretoken.models.rewindable_states import MAX_PASS_WIDTH, MAX_REWIND_TOKENS, run_in_parts
from foretoken.models.row_slots import (
    LONG_ROW_OFFSET,
    PREFILL_CHUNK_TOKENS,
    add_spare_rows,
    check_lengths,
    check_room,
    check_sources,
    compute_max_positions,
    pad_blocks,
)
from foretoken.models.stock.attention import NeededPositions, RaggedTwin
from foretoken.models.stock.cache import (
    CAPACITY_MULTIPLE,
    CrossCache,
    RaggedCache,
    admit,
    make_cache_argument,
    make_ragged_cache,
)
from foretoken.models.stock.media import (
    EncoderOutput,
    MediaObjections,
    capture_generate_arguments,
    compute_encoder_key,
    compute_position_shift,
    embed_in_chunks,
    encode_without_padding,
    get_language_model,
    make_placeholder_states,
    prepare_first_forward,
)
from foretoken.models.stock.positions import takes_positions
from foretoken.models.stock.sizes import (
    find_last_kv_layers,
    get_context_limit,
    get_encoder_limit,
    get_encoder_vocab_size,
    get_max_positions,
    get_output_vocab_size,
    get_rope_switch_length,
    make_empty_logits,
    takes_ids,
)
from foretoken.transfer import send


class TorchModel(Model):
    """A model that runs transformers' own code. `full_model` is the user's model, and `model` the
    language model in it (often the same). A twin of `model`, without dropout, runs the forward
    passes; the user's model stays unmodified."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.full_model, self.model = model, get_language_model(model)
        self.joining_media: list[Media | None] = []
        self.needs_media = not takes_ids(model)
        self._objections = MediaObjections(model)
        model = self.model
        self.device, self.compute_dtype = model.device, str(model.dtype).removeprefix("torch.")
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        self.vocab_size = get_output_vocab_size(model)
        self.context = get_context_limit(model.config.get_text_config(decoder=True))
        if self.encoder_decoder:
            self.source_context = get_encoder_limit(model)
            self.source_vocab_size = get_encoder_vocab_size(model)

    def find_media_problem(self, media: Media) -> str | None:
        return self._objections.to(media, lambda: type(self)(self.full_model))


class StockModel(TorchModel):
    """A model that runs all sequences in one forward pass, over one cache."""

    runtime = "transformers"
    capabilities = Capabilities(media=True, memory=True, hidden=True, taps=True)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        model = self.model
        self.exposes_states = False
        self.capabilities = replace(self.capabilities, tensors=self.device.type != "cpu")
        if get_rope_switch_length(model) is not None:
            self._max_context = get_max_positions(model.config.get_text_config(decoder=True))
        self.twin = RaggedTwin(model)
        self.cache: Any = self._make_empty_cache()  # a RaggedCache or a CrossCache
        self.max_rewind = MAX_REWIND_TOKENS if self.cache.decoder.states else None

    @abstractmethod
    def _make_empty_cache(self) -> Any:
        """Return a cache without sequences."""

    @abstractmethod
    def prefill(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> Any:
        """Return a new cache of `prompts` and, for an encoder-decoder, of their sources."""

    @abstractmethod
    def _make_inputs(self, ids: Tensor, cache: Any) -> dict[str, Any]:
        """Return the arguments of the forward, except the cache, for new tokens `ids` `[B,
        width]`."""

    @torch.inference_mode()
    def compute_cache_bytes(self, lengths: list[int], sources: list[int]) -> int:
        slot, cross, states = self._cache_bytes
        slots = slot * compute_max_positions(
            lengths, CAPACITY_MULTIPLE
        ) + cross * compute_max_positions(sources, CAPACITY_MULTIPLE)
        return slots + states * add_spare_rows(len(lengths))

    @cached_property
    def _cache_bytes(self) -> tuple[int, int, int]:
        """The bytes of one token's keys and values, of one source token's keys and values, and of
        one sequence's recurrent states."""
        cache = self.prefill([[0]], [[0]] if self.encoder_decoder else None)
        ragged, cross = cache.decoder, cache.cross.slot_bytes if self.encoder_decoder else 0
        return ragged.slot_bytes, cross, ragged.state_bytes

    @property
    def lengths(self) -> list[int]:
        return self.cache.decoder.lengths

    @property
    def long(self) -> list[bool]:
        return self.cache.decoder.long

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not self.lengths and prompts:
            self.twin.renew()
        joining = self.prefill_joining(prompts, sources)
        if self.lengths and joining is not None:
            self.cache.join(joining)
        elif joining is not None:
            self.cache = joining

    def prefill_joining(self, prompts: list[list[int]], sources: list[list[int]] | None) -> Any:
        """Return a new cache of `prompts` with the media in `joining_media`; None if there are no
        prompts."""
        media, self.joining_media = self.joining_media, []
        if not prompts:
            return None
        if any(media):
            return self._prefill_each(prompts, sources, media)
        return self.prefill(prompts, sources)

    def _prefill_each(
        self,
        prompts: list[list[int]],
        sources: list[list[int]] | None,
        media: list[Media | None],
    ) -> Any:
        """Return a new cache of `prompts`, which are prefilled one after the other because some
        have media."""
        caches: list[Any] = []
        for b, (prompt, item) in enumerate(zip(prompts, media, strict=True)):
            source = None if sources is None else [sources[b]]
            # If a draft model cannot take a sequence, an empty prompt joins without media
            if item is None or (source is None and not prompt and len(item.ids) > 1):
                caches.append(self.prefill([prompt], source))
            else:
                caches.append(self.prefill_media(prompt, item))
        for cache in caches[1:]:
            caches[0].join(cache)
        return caches[0]

    @abstractmethod
    def prefill_media(self, prompt: list[int], media: Media) -> Any:
        """Return a new cache of a prompt with media."""

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        return self._run(self.cache, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self.cache.decoder.check_rewind(self.lengths, lengths)
        self.cache.decoder.lengths = list(lengths)
        self.cache.decoder.shown.truncate(lengths)

    def tap(self, taps: tuple[int, ...]) -> None:
        self.twin, self.taps = RaggedTwin(self.model, taps=taps), taps

    def expose_hidden_states(self, known: Callable[[list[int]], int] | None) -> None:
        self.exposes_states = known is not None and bool(self.taps)

    def take_hidden_states(self) -> list[HiddenStates | None]:
        return self.cache.decoder.shown.take()

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        if rows:
            self.cache.select(rows)
        else:  # frees the memory of an idle model
            self.cache = self._make_empty_cache()

    def count_padded_positions(self, batch_size: int, width: int) -> int:
        return batch_size * width

    def _run(self, cache: Any, blocks: Blocks, need: list[int]) -> Tensor:
        ragged, counts = cache.decoder, count_block_tokens(blocks, need)
        check_room(ragged.lengths, counts, self.compute_max_lengths(ragged.long))
        if not any(counts):
            return make_empty_logits(self.model, len(counts))
        if ragged.states and max(counts) > MAX_PASS_WIDTH:
            return self._run_in_parts(cache, blocks, need)
        ids = pad_blocks(blocks, self.device)
        cache.prepare(ids.shape[1], counts)
        ids = ragged.to_slot_order(ids)
        self.padding = ids.numel() - sum(counts)
        needed = NeededPositions(counts, need, ragged.slots, self.device)
        logits = self._forward(cache, counts, needed, self._make_inputs(ids, cache))
        self._hidden = needed.hidden
        return needed.logits(logits)

    def _forward(
        self, cache: Any, counts: list[int], needed: NeededPositions, inputs: dict[str, Any]
    ) -> Tensor:
        """Run the twin over counts[b] new tokens of each sequence b and add the tokens to the
        cache. Returns the twin's logits."""
        ragged = cache.decoder
        tap_states: dict[int, Tensor] | None = {} if self.exposes_states else None
        arguments = (
            inputs
            | make_cache_argument(self.model, cache)
            | {"use_cache": True, "return_dict": True}
        )
        with self.twin(ragged, needed, tap_states) as model:
            logits = model(**arguments).logits
        if tap_states:
            states = zip(ragged.slots, counts, strict=True)
            new = [torch.cat([tap_states[j][at, :n] for j in self.taps], -1) for at, n in states]
            ragged.shown.add(ragged.lengths, new)
        ragged.advance(counts)
        return logits

    def _run_in_parts(self, cache: Any, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list), "only lists of tokens can be this long"

        def run(parts: list[list[int]], some: list[int]) -> tuple[Tensor, Tensor]:
            return self._run(cache, parts, some), self.hidden

        made = run_in_parts(run, blocks, need)
        if made is None:
            return make_empty_logits(self.model, len(blocks))
        logits, self._hidden = made
        return logits


class CausalModel(StockModel):
    """A decoder-only model over a ragged cache. Raises RefusedError if its sequences cannot be
    rolled back independently of each other."""

    capabilities = replace(StockModel.capabilities, shared_kv=True)

    def __init__(self, model: PreTrainedModel) -> None:
        admit(get_language_model(model), states=True)
        if get_language_model(model).config.is_encoder_decoder:
            raise RefusedError(
                f"{type(model).__name__} has an encoder: run it as an encoder-decoder"
            )
        super().__init__(model)
        self.takes_positions = takes_positions(self.model)

    def get_shared_kv(self, kind: str, rows: list[int], first: int) -> SharedKV:
        layer = find_last_kv_layers(self.model.config.get_text_config(decoder=True))[kind]
        return self.cache.get_shared_kv(layer, rows, first)

    def _make_empty_cache(self) -> RaggedCache:
        return make_ragged_cache(self.model, 0)

    @torch.inference_mode()
    def prefill(
        self, prompts: list[list[int]], sources: list[list[int]] | None = None
    ) -> RaggedCache:
        fresh = make_ragged_cache(self.model, len(prompts))
        fresh.long = [self._long_context] * len(prompts)
        for at in range(0, max(map(len, prompts), default=0), PREFILL_CHUNK_TOKENS):
            self._run(
                fresh, [p[at : at + PREFILL_CHUNK_TOKENS] for p in prompts], [0] * len(prompts)
            )
        return fresh

    @torch.inference_mode()
    def prefill_media(self, prompt: list[int], media: Media) -> RaggedCache:
        """Return a new cache of a prompt with media.

        The tokens of `media.ids` run in one forward pass, as in `generate`, since these tokens may
        attend to each other in both directions. If `prompt` is shorter than `media.ids`, the cache
        is rolled back to the length of `prompt`. If `prompt` is longer, because a sequence joins
        again together with its output, the tokens after `media.ids` run without media.
        """
        ids = media.ids
        n, fresh = len(ids), make_ragged_cache(self.model, 1)
        fresh.long = [self._long_context]
        check_room([0], [max(n, len(prompt))], self.compute_max_lengths([self._long_context]))
        prompt_ids = torch.tensor([ids], device=self.device)
        fitted = media.fit_inputs(n, self.model.dtype, self.device)
        with self.twin(None) as model:
            inputs = prepare_first_forward(
                model, prompt_ids, capture_generate_arguments(self.full_model, prompt_ids, fitted)
            )
            # Recurrent states advance by at most MAX_PASS_WIDTH tokens per forward pass
            in_one_pass = not fresh.states or n <= MAX_PASS_WIDTH
            parts = [inputs] if in_one_pass else embed_in_chunks(model, inputs, MAX_PASS_WIDTH)
        for part in parts:
            self._append_part(fresh, part)
        fresh.position_shift = [compute_position_shift(inputs.get("position_ids"), n)]
        if len(prompt) > n:
            self._run(fresh, [prompt[n:]], [0])
            return fresh
        fresh.check_rewind([n], [len(prompt)])
        fresh.lengths = [len(prompt)]
        fresh.shown.truncate([len(prompt)])
        return fresh

    def _append_part(self, fresh: RaggedCache, inputs: dict[str, Any]) -> None:
        """Run the tokens of `inputs` and append the tokens to a cache of one sequence."""
        ids = inputs.get("input_ids")
        width = inputs["inputs_embeds"].shape[1] if ids is None else ids.shape[1]
        fresh.prepare(width, [width])
        needed = NeededPositions([width], [0], fresh.slots, self.device)
        self._forward(fresh, [width], needed, inputs)

    def _make_inputs(self, ids: Tensor, cache: RaggedCache) -> dict[str, Any]:
        if not self.takes_positions:
            return {"input_ids": ids}
        positions = cache.positions
        if any(cache.position_shift):
            shift = cache.to_slot_order(send(torch.tensor(cache.position_shift), self.device))
            positions = positions + shift[:, None]
        if self.max_context is not None and cache.max_context + cache.width > self.max_context:
            positions = positions.clamp(max=self.max_context - 1)  # padding only
        if any(cache.long):
            long = cache.to_slot_order(send(torch.tensor(cache.long), self.device))
            positions = positions + LONG_ROW_OFFSET * long[:, None]
        return {"input_ids": ids, "position_ids": positions}


class Seq2SeqModel(StockModel):
    """An encoder-decoder over ragged caches. Raises RefusedError if its sequences cannot be rolled
    back independently of each other."""

    def __init__(self, model: PreTrainedModel) -> None:
        admit(get_language_model(model))
        if not get_language_model(model).config.is_encoder_decoder:
            raise RefusedError(f"{type(model).__name__} has no encoder: run it as a causal model")
        super().__init__(model)
        self.takes_positions = takes_positions(self.model)
        self._encoder_width = 1  # hidden size of the encoder's states
        self._states_by_source: dict[tuple[int, ...], Tensor] = {}
        self.shared_encoder_states = self._states_by_source

    def _make_empty_cache(self) -> CrossCache:
        return self._make_cache([])

    def _make_cache(self, sources: list[int]) -> CrossCache:
        own, cross = (make_ragged_cache(self.model, len(sources)) for _ in range(2))
        return CrossCache(own, cross, sources)

    @torch.inference_mode()
    def prefill(
        self, prompts: list[list[int]], sources: list[list[int]] | None = None
    ) -> CrossCache:
        check_sources(prompts, sources, self.source_context)
        assert sources is not None
        if self.needs_media:
            states = torch.cat([make_placeholder_states(self.model, source) for source in sources])
            fresh = self._make_cache([states.shape[1]] * len(sources))
            fresh.states = states
        else:
            fresh = self._make_cache([len(source) for source in sources])
            fresh.states = self._encode_sources(sources, fresh.make_source_mask())
        return self._prefill_decoder(fresh, prompts)

    @cached_property
    def encoder_key(self) -> str:
        return compute_encoder_key(self.model)

    @torch.inference_mode()
    def prefill_media(self, prompt: list[int], media: Media) -> CrossCache:
        """Return a cache of a prompt, with media as the encoder's input."""
        start = perf_counter()
        with self.twin(None) as model:
            states = encode_without_padding(model, media, self.encoder_key, self.full_model)
        self.encoder_seconds += perf_counter() - start
        fresh = self._make_cache([states.shape[1]])
        fresh.states = states
        return self._prefill_decoder(fresh, [prompt])

    def _prefill_decoder(self, fresh: CrossCache, prompts: list[list[int]]) -> CrossCache:
        """Prefill `prompts` over a new cache that has the encoder's hidden states; return the
        cache."""
        # The first forward pass caches the encoder's keys and values, so it runs even if all
        # prompts are empty, over one token that is then removed.
        for at in range(0, max(1, *map(len, prompts)), PREFILL_CHUNK_TOKENS):
            blocks = [p[at : at + PREFILL_CHUNK_TOKENS] or [0] * (at == 0) for p in prompts]
            self._run(fresh, blocks, [0] * len(prompts))
        fresh.decoder.lengths = [len(p) for p in prompts]
        if fresh.states is not None:
            self._encoder_width, fresh.states = fresh.states.shape[-1], None
        return fresh

    def _encode_sources(self, sources: list[list[int]], mask: Tensor | None) -> Tensor:
        """Return the encoder's hidden states of all sources, `[B, S, H]`, padded on the right."""
        cached = [self._states_by_source.get(tuple(source)) for source in sources]
        present = [states for states in cached if states is not None]
        if len(present) == len(sources):
            return pad_sequence(present, batch_first=True)
        start = perf_counter()
        with self.twin(None) as model:
            output = model.get_encoder()(
                input_ids=pad_blocks(sources, self.device), attention_mask=mask, return_dict=True
            )
        self.encoder_seconds += perf_counter() - start
        return output.last_hidden_state

    def _make_inputs(self, ids: Tensor, cache: CrossCache) -> dict[str, Any]:
        return self.make_decoder_inputs(ids, cache)

    def make_decoder_inputs(self, ids: Tensor, cache: CrossCache) -> dict[str, Any]:
        """Return the arguments of the decoder's forward pass over new tokens `ids`, `[B, width]`,
        except the cache. The cache has the positions of these tokens, and the encoder's output."""
        positions, mask = (
            {"decoder_position_ids": cache.decoder.positions},
            cache.make_source_mask(),
        )
        if self.needs_media:  # `attention_mask` would be the mask of the encoder's input
            cache.decoder.encoder_mask, mask = mask, None
        return {
            "decoder_input_ids": ids,
            # pyright: ignore
            ENCODER_OUTPUTS: EncoderOutput(last_hidden_state=self._get_encoder_states(cache)),
            "attention_mask": mask,
            **(positions if self.takes_positions else {}),
        }

    def _get_encoder_states(self, cache: CrossCache) -> Tensor:
        """Return the encoder's hidden states. If the states' keys and values are cached, return
        zeros of the same shape instead, since the decoder then uses only the shape."""
        if cache.states is not None:
            return cache.states
        shape = *cache.source_shape, self._encoder_width
        return torch.zeros((), dtype=self.model.dtype, device=self.device).expand(shape)
