"""A Model over a ragged cache, by transformers' own code: decoder-only models, and
encoder-decoders, whose encoder runs once for each row, when it joins.

Blocks of different lengths are padded on the right and run as one batch; only the positions that
are needed go through the output layer. Does not know how tokens are chosen, nor which token starts
a decoder.
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
from foretoken.media.inputs import ENCODED, Media
from foretoken.models.base import Blocks, Capabilities, SharedKV, Model, count_block_tokens
from foretoken.models.row_slots import (
    LONG_ROW_OFFSET,
    PREFILL_CHUNK_TOKENS,
    check_lengths,
    check_room,
    check_sources,
    compute_max_positions,
    pad_blocks,
    add_spare_rows,
)
from foretoken.models.hidden_states import HiddenStates
from foretoken.models.rewindable_states import MAX_PASS_WIDTH, MAX_REWIND_TOKENS, run_in_parts
from foretoken.models.stock.attention import Forward, Needed
from foretoken.models.stock.cache import (
    BUCKET,
    CrossCache,
    RaggedCache,
    admit,
    given,
    ragged_cache,
)
from foretoken.models.stock.media import (
    EncoderOutput,
    Objections,
    embedded_parts,
    encoder_key,
    first_pass,
    handed_over,
    heard,
    shift_of,
    stand_in,
    writer,
)
from foretoken.models.stock.positions import takes_positions
from foretoken.models.stock.sizes import (
    context_limit,
    encoder_limit,
    encoder_rows,
    key_layers,
    no_logits,
    output_rows,
    positions,
    reads_ids,
    switch_of,
)
from foretoken.transfer import sent


class TorchModel(Model):
    """A model by transformers' own code: `whole`, and the part of it that writes, `model`, of which
    a twin runs without dropout; the model itself stays as it is."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.whole, self.model = model, writer(model)
        self.joining_media: list[Media | None] = []
        self.needs_media = not reads_ids(model)
        self._objections = Objections(model)
        model = self.model
        self.device, self.compute_dtype = model.device, str(model.dtype).removeprefix("torch.")
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        self.vocab_size = output_rows(model)
        self.context = context_limit(model.config.get_text_config(decoder=True))
        if self.encoder_decoder:
            self.source_context = encoder_limit(model)
            self.source_vocab_size = encoder_rows(model)

    def find_media_problem(self, media: Media) -> str | None:
        return self._objections.to(media, lambda: type(self)(self.whole))


class StockModel(TorchModel):
    """Runs rows over one cache, in one pass."""

    runtime = "transformers"
    capabilities = Capabilities(media=True, memory=True, hidden=True, taps=True)

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(model)
        model = self.model
        self.showing = False
        self.capabilities = replace(self.capabilities, tensors=self.device.type != "cpu")
        if switch_of(model) is not None:
            self._max_context = positions(model.config.get_text_config(decoder=True))
        self.running = Forward(model)
        self.cache: Any = self._empty()  # RaggedCache, or CrossCache over one
        self.max_rewind = MAX_REWIND_TOKENS if self.cache.decoder.states else None

    @abstractmethod
    def _empty(self) -> Any:
        """A cache without rows."""

    @abstractmethod
    def read(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> Any:
        """A cache of its own with all of `prompts`."""

    @abstractmethod
    def _inputs(self, ids: Tensor, cache: Any) -> dict[str, Any]:
        """Return the forward's arguments for new tokens `ids`, by name, besides the cache
        itself."""

    @torch.inference_mode()
    def memory(self, lengths: list[int], sources: list[int]) -> int:
        slot, cross, states = self._bytes
        slots = slot * compute_max_positions(lengths, BUCKET) + cross * compute_max_positions(sources, BUCKET)
        return slots + states * add_spare_rows(len(lengths))

    @cached_property
    def _bytes(self) -> tuple[int, int, int]:
        """Return the bytes of a token, of one of its source, and of a row's states."""
        cache = self.read([[0]], [[0]] if self.encoder_decoder else None)
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
        media, self.joining_media = self.joining_media, []
        if not prompts:
            return
        if not self.lengths:
            self.running.renew()
        if any(media):
            read = self._read_media(prompts, sources, media)
        else:
            read = self.read(prompts, sources)
        if self.lengths:
            self.cache.join(read)
        else:
            self.cache = read

    def _read_media(
        self,
        prompts: list[list[int]],
        sources: list[list[int]] | None,
        media: list[Media | None],
    ) -> Any:
        """A cache of its own with all of `prompts`, those with media read one by one."""
        rows: list[Any] = []
        for b, (prompt, one) in enumerate(zip(prompts, media, strict=True)):
            source = None if sources is None else [sources[b]]
            # a draft that cannot read a text begins it with nothing
            if one is None or (source is None and not prompt and len(one.ids) > 1):
                rows.append(self.read([prompt], source))
            else:
                rows.append(self.read_with(prompt, one))
        for row in rows[1:]:
            rows[0].join(row)
        return rows[0]

    @abstractmethod
    def read_with(self, prompt: list[int], media: Media) -> Any:
        """A cache of its own with a prompt and its media."""

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        return self._run(self.cache, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self.cache.decoder.check_rewind(self.lengths, lengths)
        self.cache.decoder.lengths = list(lengths)
        self.cache.decoder.shown.truncate(lengths)

    def tap(self, taps: tuple[int, ...]) -> None:
        self.running, self.taps = Forward(self.model, taps=taps), taps

    def expose_hidden_states(self, known: Callable[[list[int]], int] | None) -> None:
        self.showing = known is not None and bool(self.taps)

    def take_hidden_states(self) -> list[HiddenStates | None]:
        return self.cache.decoder.shown.take()

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        if rows:
            self.cache.select(rows)
        else:  # an idle model keeps no memory
            self.cache = self._empty()

    def _run(self, cache: Any, blocks: Blocks, need: list[int]) -> Tensor:
        ragged, counts = cache.decoder, count_block_tokens(blocks, need)
        check_room(ragged.lengths, counts, self.compute_max_lengths(ragged.long))
        if not any(counts):
            return no_logits(self.model, len(counts))
        if ragged.states and max(counts) > MAX_PASS_WIDTH:
            return self._run_in_parts(cache, blocks, need)
        ids = pad_blocks(blocks, self.device)
        cache.prepare(ids.shape[1], counts)
        ids = ragged.placed(ids)
        self.padding = ids.numel() - sum(counts)
        needed = Needed(counts, need, ragged.slots, self.device)
        logits = self._forward(cache, counts, needed, self._inputs(ids, cache))
        self._hidden = needed.hidden
        return needed.logits(logits)

    def _forward(
        self, cache: Any, counts: list[int], needed: Needed, inputs: dict[str, Any]
    ) -> Tensor:
        """Return what the twin makes of inputs, counts[b] tokens of each row, and advance."""
        ragged = cache.decoder
        noted: dict[int, Tensor] | None = {} if self.showing else None
        own = inputs | given(self.model, cache) | {"use_cache": True, "return_dict": True}
        with self.running(ragged, needed, noted) as model:
            logits = model(**own).logits
        if noted:
            states = zip(ragged.slots, counts, strict=True)
            new = [torch.cat([noted[j][at, :n] for j in self.taps], -1) for at, n in states]
            ragged.shown.add(ragged.lengths, new)
        ragged.advance(counts)
        return logits

    def _run_in_parts(self, cache: Any, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list), "draft tokens are fewer"

        def run(parts: list[list[int]], some: list[int]) -> tuple[Tensor, Tensor]:
            return self._run(cache, parts, some), self.hidden

        made = run_in_parts(run, blocks, need)
        if made is None:
            return no_logits(self.model, len(blocks))
        logits, self._hidden = made
        return logits


class CausalModel(StockModel):
    """Raises RefusedError where rows cannot be rolled back one by one."""

    capabilities = replace(StockModel.capabilities, shared_kv=True)

    def __init__(self, model: PreTrainedModel) -> None:
        admit(writer(model), states=True)
        if writer(model).config.is_encoder_decoder:
            raise RefusedError(
                f"{type(model).__name__} has an encoder: run it as an encoder-decoder"
            )
        super().__init__(model)
        self.takes_positions = takes_positions(self.model)

    def shared_kv(self, kind: str, rows: list[int], first: int) -> SharedKV:
        layer = key_layers(self.model.config.get_text_config(decoder=True))[kind]
        return self.cache.shared_kv(layer, rows, first)

    def _empty(self) -> RaggedCache:
        return ragged_cache(self.model, 0)

    @torch.inference_mode()
    def read(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> RaggedCache:
        fresh = ragged_cache(self.model, len(prompts))
        fresh.long = [self._long_context] * len(prompts)
        for at in range(0, max(map(len, prompts), default=0), PREFILL_CHUNK_TOKENS):
            self._run(fresh, [p[at : at + PREFILL_CHUNK_TOKENS] for p in prompts], [0] * len(prompts))
        return fresh

    @torch.inference_mode()
    def read_with(self, prompt: list[int], media: Media) -> RaggedCache:
        """In one pass, as `generate` makes it, over all of the prompt, whose tokens may attend to
        one another both ways; tokens beyond `prompt` are taken back. A sequence that joins
        again has text behind the prompt, whatever its tokens stand for."""
        ids = media.ids
        n, fresh = len(ids), ragged_cache(self.model, 1)
        fresh.long = [self._long_context]
        check_room([0], [max(n, len(prompt))], self.compute_max_lengths([self._long_context]))
        text = torch.tensor([ids], device=self.device)
        fitted = media.fitted(n, self.model.dtype, self.device)
        with self.running(None) as model:
            inputs = first_pass(model, text, handed_over(self.whole, text, fitted))
            # states follow from a few tokens at a time: their embeddings are made for all
            whole = not fresh.states or n <= MAX_PASS_WIDTH
            parts = [inputs] if whole else embedded_parts(model, inputs, MAX_PASS_WIDTH)
        for part in parts:
            self._read_part(fresh, part)
        fresh.shift = [shift_of(inputs.get("position_ids"), n)]
        if len(prompt) > n:
            self._run(fresh, [prompt[n:]], [0])
            return fresh
        fresh.check_rewind([n], [len(prompt)])
        fresh.lengths = [len(prompt)]
        fresh.shown.truncate([len(prompt)])
        return fresh

    def _read_part(self, fresh: RaggedCache, inputs: dict[str, Any]) -> None:
        """Append tokens to the only row."""
        ids = inputs.get("input_ids")
        width = inputs["inputs_embeds"].shape[1] if ids is None else ids.shape[1]
        fresh.prepare(width, [width])
        needed = Needed([width], [0], fresh.slots, self.device)
        self._forward(fresh, [width], needed, inputs)

    def _inputs(self, ids: Tensor, cache: RaggedCache) -> dict[str, Any]:
        if not self.takes_positions:
            return {"input_ids": ids}
        positions = cache.positions
        if any(cache.shift):
            shift = cache.placed(sent(torch.tensor(cache.shift), self.device))
            positions = positions + shift[:, None]
        if self.max_context is not None and cache.max_context + cache.width > self.max_context:
            positions = positions.clamp(max=self.max_context - 1)  # padding only
        if any(cache.long):
            long = cache.placed(sent(torch.tensor(cache.long), self.device))
            positions = positions + LONG_ROW_OFFSET * long[:, None]
        return {"input_ids": ids, "position_ids": positions}


class Seq2SeqModel(StockModel):
    """Raises RefusedError where rows cannot be rolled back one by one."""

    def __init__(self, model: PreTrainedModel) -> None:
        admit(writer(model))
        if not writer(model).config.is_encoder_decoder:
            raise RefusedError(f"{type(model).__name__} has no encoder: run it as a causal model")
        super().__init__(model)
        self.takes_positions = takes_positions(self.model)
        self._heard_width = 1  # of the encoder's states
        self._heard: dict[tuple[int, ...], Tensor] = {}
        self.shared_encoder_states = self._heard

    def _empty(self) -> CrossCache:
        return self._fresh([])

    def _fresh(self, sources: list[int]) -> CrossCache:
        """For rows whose sources have so many tokens."""
        own, cross = (ragged_cache(self.model, len(sources)) for _ in range(2))
        return CrossCache(own, cross, sources)

    @torch.inference_mode()
    def read(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> CrossCache:
        check_sources(prompts, sources, self.source_context)
        assert sources is not None
        if self.needs_media:
            states = torch.cat([stand_in(self.model, source) for source in sources])
            fresh = self._fresh([states.shape[1]] * len(sources))
            fresh.states = states
        else:
            fresh = self._fresh([len(source) for source in sources])
            fresh.states = self._encoded(sources, fresh.mask())
        return self._begun(fresh, prompts)

    @cached_property
    def encoder_key(self) -> str:
        return encoder_key(self.model)

    @torch.inference_mode()
    def read_with(self, prompt: list[int], media: Media) -> CrossCache:
        """With the media in the encoder."""
        start = perf_counter()
        with self.running(None) as model:
            states = heard(model, media, self.encoder_key, self.whole)
        self.encoder_seconds += perf_counter() - start
        fresh = self._fresh([states.shape[1]])
        fresh.states = states
        return self._begun(fresh, [prompt])

    def _begun(self, fresh: CrossCache, prompts: list[list[int]]) -> CrossCache:
        """The cache, which holds the encoder's states, with all of `prompts`."""
        # The first run makes the encoder's keys and values, so there is one even without a prompt:
        # its token is then taken back.
        for at in range(0, max(1, *map(len, prompts)), PREFILL_CHUNK_TOKENS):
            blocks = [p[at : at + PREFILL_CHUNK_TOKENS] or [0] * (at == 0) for p in prompts]
            self._run(fresh, blocks, [0] * len(prompts))
        fresh.decoder.lengths = [len(p) for p in prompts]
        if fresh.states is not None:
            self._heard_width, fresh.states = fresh.states.shape[-1], None
        return fresh

    def _encoded(self, sources: list[list[int]], mask: Tensor | None) -> Tensor:
        """The encoder's states of every source, `[B, S, H]`."""
        cached = [self._heard.get(tuple(source)) for source in sources]
        present = [states for states in cached if states is not None]
        if len(present) == len(sources):
            return pad_sequence(present, batch_first=True)
        start = perf_counter()
        with self.running(None) as model:
            read = model.get_encoder()(
                input_ids=pad_blocks(sources, self.device), attention_mask=mask, return_dict=True
            )
        self.encoder_seconds += perf_counter() - start
        return read.last_hidden_state

    def _inputs(self, ids: Tensor, cache: CrossCache) -> dict[str, Any]:
        positions, mask = {"decoder_position_ids": cache.decoder.positions}, cache.mask()
        if self.needs_media:  # masks of what the encoder has read are longer than its states
            cache.decoder.shared_encoder_states, mask = mask, None
        return {
            "decoder_input_ids": ids,
            ENCODED: EncoderOutput(last_hidden_state=self._states(cache)),  # pyright: ignore
            "attention_mask": mask,
            **(positions if self.takes_positions else {}),
        }

    def _states(self, cache: CrossCache) -> Tensor:
        """The encoder's; once their keys and values are cached, only the shape is read."""
        if cache.states is not None:
            return cache.states
        shape = len(cache.cross.lengths), max(cache.cross.lengths), self._heard_width
        return torch.zeros((), dtype=self.model.dtype, device=self.device).expand(shape)
