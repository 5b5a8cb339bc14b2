"""A decoder-only transformers model behind the Model protocol: stock code over a ragged cache.

Blocks of different lengths are padded on the right and run as one batch; only the positions that
someone needs go through the output layer. It does not know how tokens are chosen.
"""

from __future__ import annotations

import inspect

import torch
from torch import Tensor
from transformers import PreTrainedConfig, PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.base import Blocks, Tree, counts_of
from foretoken.models.rows import CHUNK, check_lengths, check_room, padded, staying
from foretoken.models.stock.attention import Forward
from foretoken.models.stock.cache import RaggedCache, admit, ragged_cache
from foretoken.models.stock.needed import Needed, shown


class CausalModel:
    """Runs a twin of `model`, without dropout; the model itself stays as it is.

    Raises RefusedError where rows cannot be rolled back one by one.
    """

    encoder_decoder = False
    source_context: int | None = None
    source_vocab_size: int | None = None
    runtime = "transformers"

    def __init__(self, model: PreTrainedModel) -> None:
        admit(model)
        accepted = inspect.signature(model.forward).parameters
        if model.config.is_encoder_decoder or "position_ids" not in accepted:
            raise RefusedError(
                f"{type(model).__name__} takes no position_ids, so rows cannot differ in length"
            )
        self.model = model
        self.device = model.device
        self.computed = str(model.dtype).removeprefix("torch.")
        self.takes_tensors = self.device.type != "cpu"
        self.context: int | None = limit(model.config.get_text_config(decoder=True))
        self.vocab_size = output_rows(model)
        self.running = Forward(model)
        self.cache = ragged_cache(model, 0)
        self._hidden: Tensor | None = None

    @property
    def hidden(self) -> Tensor:
        return shown(self._hidden)

    @torch.inference_mode()
    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if not self.cache.lengths:
            self.running.renew()
        fresh = self.read(prompts)
        if self.cache.lengths:
            self.cache.join(fresh)
        else:
            self.cache = fresh

    @torch.inference_mode()
    def read(self, prompts: list[list[int]]) -> RaggedCache:
        """A cache of its own with all of `prompts`."""
        fresh = ragged_cache(self.model, len(prompts))
        for at in range(0, max(map(len, prompts), default=0), CHUNK):
            self._run(fresh, [p[at : at + CHUNK] for p in prompts], [0] * len(prompts))
        return fresh

    @torch.inference_mode()
    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        return self._run(self.cache, blocks, need)

    @torch.inference_mode()
    def score_tree(self, blocks: list[list[int]], tree: Tree) -> Tensor:
        return self._run(self.cache, blocks, [len(block) for block in blocks], tree)

    @torch.inference_mode()
    def keep(self, slots: list[list[int]]) -> None:
        self.cache.keep(slots)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.cache.lengths, lengths)
        self.cache.lengths = list(lengths)

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        if not rows and self.cache.lengths:
            self.cache = ragged_cache(self.model, 0)
        elif rows != list(range(len(self.cache.lengths))):
            self.cache.select(rows)

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.cache.lengths), rows))

    def _run(
        self, cache: RaggedCache, blocks: Blocks, need: list[int], tree: Tree | None = None
    ) -> Tensor:
        ids, counts = padded(blocks, self.device), counts_of(blocks, need)
        if not ids.shape[1]:
            return nothing(self.model, len(blocks))
        check_room(cache.lengths, counts, None if tree else self.context)
        cache.prepare(ids.shape[1], tree)
        needed = Needed(counts, need, self.device)
        positions = cache.positions
        if self.context is not None and cache.longest + cache.width > self.context:
            positions = positions.clamp(max=self.context - 1)  # padding only
        with self.running(cache, needed) as model:
            logits = model(
                input_ids=ids,
                position_ids=positions,
                past_key_values=cache,
                use_cache=True,
                return_dict=True,
            ).logits
        cache.advance(counts)
        self._hidden = needed.hidden
        return needed.logits(logits)


def limit(config: PreTrainedConfig) -> int | None:
    """Positions that a stack has, or None where nothing limits them.

    Rotary frequencies that change with the longest text in a batch (dynamic, longrope) would make
    rows depend on each other and on what is cached: such a model ends where they would change.
    """
    most = getattr(config, "max_position_embeddings", None)
    if not isinstance(most, int) or most <= 0:
        return None
    rope = getattr(config, "rope_parameters", None) or {}
    for kind in (rope, *(value for value in rope.values() if isinstance(value, dict))):
        if kind.get("rope_type") in ("dynamic", "longrope"):
            most = min(most, kind.get("original_max_position_embeddings") or most)
    return most


def output_rows(model: PreTrainedModel) -> int:
    head = model.get_output_embeddings()
    rows = getattr(head, "out_features", None)
    return int(rows or model.config.get_text_config(decoder=True).vocab_size)


def nothing(model: PreTrainedModel, rows: int) -> Tensor:
    return torch.zeros(rows, 0, output_rows(model), dtype=model.dtype, device=model.device)
