"""An encoder-decoder transformers model behind the Model protocol.

The encoder runs once per row, when the row joins; its keys and values then stand in the cache
beside the decoder's. It does not know which token starts a decoder.
"""

from __future__ import annotations

import inspect
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel
from transformers.modeling_outputs import MoEModelOutput

from foretoken.errors import RefusedError
from foretoken.models.rows import CHUNK, check_sources, padded
from foretoken.models.stock.cache import CrossCache, admit, ragged_cache
from foretoken.models.stock.model import StockModel
from foretoken.models.stock.sizes import encoder_limit, encoder_rows


class Seq2SeqModel(StockModel):
    """Raises RefusedError where rows cannot be rolled back one by one."""

    encoder_decoder = True

    def __init__(self, model: PreTrainedModel) -> None:
        admit(model)
        if not model.config.is_encoder_decoder:
            raise RefusedError(f"{type(model).__name__} has no encoder: run it as a causal model")
        super().__init__(model)
        self.source_context: int | None = encoder_limit(model)
        self.source_vocab_size: int | None = encoder_rows(model)
        accepted = inspect.signature(model.forward).parameters
        self.takes_positions = "decoder_position_ids" in accepted
        self.encoder_seconds = 0.0
        # [n, H] by the source's ids: what this very encoder made of them, in somebody else's run
        self.heard: dict[tuple[int, ...], Tensor] = {}

    def _empty(self) -> CrossCache:
        return self._fresh([])

    def _fresh(self, sources: list[list[int]]) -> CrossCache:
        own, cross = (ragged_cache(self.model, len(sources)) for _ in range(2))
        return CrossCache(own, cross, [len(source) for source in sources])

    @torch.inference_mode()
    def read(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> CrossCache:
        check_sources(prompts, sources, self.source_context)
        assert sources is not None
        fresh = self._fresh(sources)
        fresh.states = self._encoded(sources, fresh.mask())
        # The first run makes the encoder's keys and values, so there is one even without a prompt:
        # its token is then taken back.
        for at in range(0, max(1, *map(len, prompts)), CHUNK):
            blocks = [p[at : at + CHUNK] or [0] * (at == 0) for p in prompts]
            self._run(fresh, blocks, [0] * len(prompts))
        fresh.decoder.lengths = [len(p) for p in prompts]
        fresh.states = None
        return fresh

    def _encoded(self, sources: list[list[int]], mask: Tensor | None) -> Tensor:
        """The encoder's states of every source, `[B, S, H]`."""
        cached = [self.heard.get(tuple(source)) for source in sources]
        present = [states for states in cached if states is not None]
        if len(present) == len(sources):
            return pad_sequence(present, batch_first=True)
        start = perf_counter()
        with self.running(None) as model:
            read = model.get_encoder()(
                input_ids=padded(sources, self.device), attention_mask=mask, return_dict=True
            )
        self.encoder_seconds += perf_counter() - start
        return read.last_hidden_state

    def _inputs(self, ids: Tensor, cache: CrossCache) -> dict[str, Any]:
        positions = {"decoder_position_ids": cache.decoder.positions}
        return {
            "decoder_input_ids": ids,
            # the fullest of its kind: some families look for their experts' choices in it
            "encoder_outputs": MoEModelOutput(last_hidden_state=self._states(cache)),  # pyright: ignore
            "attention_mask": cache.mask(),
            **(positions if self.takes_positions else {}),
        }

    def _states(self, cache: CrossCache) -> Tensor:
        """The encoder's; once their keys and values are cached, only the shape is read."""
        if cache.states is not None:
            return cache.states
        shape = len(cache.cross.lengths), max(cache.cross.lengths), 1
        return torch.zeros((), dtype=self.model.dtype, device=self.device).expand(shape)
