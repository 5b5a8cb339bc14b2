"""An encoder-decoder transformers model behind the Model protocol: stock code over a ragged cache.

The encoder runs once per row, when the row joins; its keys and values then stand in the cache
beside the decoder's. It does not know how tokens are chosen, nor which token starts a decoder.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutput

from foretoken.errors import RefusedError
from foretoken.models.base import Blocks, Tree, counts_of
from foretoken.models.rows import (
    CHUNK,
    check_lengths,
    check_room,
    check_sources,
    padded,
    staying,
)
from foretoken.models.stock.attention import Forward
from foretoken.models.stock.cache import CrossCache, admit, ragged_cache
from foretoken.models.stock.causal import limit, nothing, output_rows
from foretoken.models.stock.needed import Needed, shown


class Seq2SeqModel:
    """Runs a twin of `model`, without dropout; the model itself stays as it is.

    Raises RefusedError where rows cannot be rolled back one by one.
    """

    encoder_decoder = True
    runtime = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        admit(model)
        if not model.config.is_encoder_decoder:
            raise RefusedError(f"{type(model).__name__} has no encoder: run it as a causal model")
        accepted = inspect.signature(model.forward).parameters
        self.model = model
        self.device = model.device
        self.computed = str(model.dtype).removeprefix("torch.")
        self.takes_tensors = self.device.type != "cpu"
        self.context: int | None = limit(model.config.get_text_config(decoder=True))
        self.source_context: int | None = encoder_limit(model)
        self.source_vocab_size: int | None = encoder_rows(model)
        self.vocab_size = output_rows(model)
        self.takes_positions = "decoder_position_ids" in accepted
        self.running = Forward(model)
        self.cache: CrossCache | None = None
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        return shown(self._hidden)

    @property
    def lengths(self) -> list[int]:
        return self.cache.self_attention_cache.lengths if self.cache else []

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not prompts:
            return
        check_sources(prompts, sources, self.source_context)
        assert sources is not None
        if self.cache is None:
            self.running.renew()
        fresh = CrossCache(ragged_cache(self.model, len(prompts)), [len(s) for s in sources])
        mask = fresh.mask()
        with self.running(None) as model:
            states = model.get_encoder()(
                input_ids=padded(sources, self.device), attention_mask=mask, return_dict=True
            ).last_hidden_state
        # The first run makes the encoder's keys and values, so there is one even without a prompt:
        # its token is then taken back.
        for at in range(0, max(1, *map(len, prompts)), CHUNK):
            blocks = [p[at : at + CHUNK] or [0] * (at == 0) for p in prompts]
            self._run(fresh, blocks, [0] * len(prompts), states)
        fresh.self_attention_cache.lengths = [len(p) for p in prompts]
        if self.cache is None:
            self.cache = fresh
        else:
            self.cache.join(fresh)

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        if self.cache is None or not any(counts_of(blocks, need)):
            return nothing(self.model, len(blocks))
        return self._run(self.cache, blocks, need, self._seen(self.cache))

    @torch.inference_mode()
    def score_tree(self, blocks: list[list[int]], tree: Tree) -> Tensor:
        assert self.cache is not None
        need = [len(block) for block in blocks]
        return self._run(self.cache, blocks, need, self._seen(self.cache), tree)

    @torch.inference_mode()
    def keep(self, slots: list[list[int]]) -> None:
        if self.cache is not None:
            self.cache.self_attention_cache.keep(slots)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        if self.cache is not None:
            self.cache.self_attention_cache.lengths = list(lengths)

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        if not rows:
            self.cache = None
        elif self.cache is not None and rows != list(range(len(self.lengths))):
            self.cache.select(rows)

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.lengths), rows))

    def _seen(self, cache: CrossCache) -> Tensor:
        """Stands for encoder states whose keys and values are cached: only its shape is read."""
        shape = len(cache.sources), max(cache.sources), 1
        return torch.zeros((), dtype=self.model.dtype, device=self.device).expand(shape)

    def _run(
        self,
        cache: CrossCache,
        blocks: Blocks,
        need: list[int],
        states: Tensor,
        tree: Tree | None = None,
    ) -> Tensor:
        ragged, ids = cache.self_attention_cache, padded(blocks, self.device)
        counts = counts_of(blocks, need)
        check_room(ragged.lengths, counts, None if tree else self.context)
        ragged.prepare(ids.shape[1], tree)
        needed = Needed(counts, need, self.device)
        extra = {"decoder_position_ids": ragged.positions} if self.takes_positions else {}
        with self.running(ragged, needed) as model:
            logits = model(
                decoder_input_ids=ids,
                encoder_outputs=BaseModelOutput(last_hidden_state=states),  # pyright: ignore
                attention_mask=cache.mask(),
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
                **extra,
            ).logits
        ragged.advance(counts)
        self._hidden = needed.hidden
        return needed.logits(logits)


def encoder_limit(model: PreTrainedModel) -> int | None:
    for name in ("max_encoder_position_embeddings", "max_source_positions"):
        if getattr(model.config, name, None):
            return int(getattr(model.config, name))
    return limit(model.config.get_text_config(encoder=True))


def encoder_rows(model: PreTrainedModel) -> int:
    """Ids that the encoder knows: some families give it a vocabulary of its own."""
    words: Any = model.get_encoder().get_input_embeddings()
    return words.weight.shape[0]
