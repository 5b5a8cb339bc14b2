"""A model whose logits are, to the bit, a function of the text alone (`exact_shapes=True`).

Rounding depends on the shape of a pass, and within one shape on a token's place in it. So every
row runs by itself, and its passes lie on a grid: pass k starts at position k * WIDTH. However a
text is cut into blocks, a token is then computed in the same shapes, at the same place, behind the
same predecessors; what stands behind it differs, but causality hides that. It does not know how
tokens are chosen.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from foretoken.errors import RefusedError
from foretoken.models.base import Blocks
from foretoken.models.rows import check_lengths, check_room, check_sources, staying
from foretoken.models.stock.model import CausalModel, Seq2SeqModel
from foretoken.models.stock.selfcheck import Form

WIDTH = 16  # tokens of a pass; a block that crosses a line of the grid takes two


@dataclass(slots=True)
class Alone:
    """A row: its tokens, and a model that holds only it. Tokens that the model holds beyond them
    are written over by the next pass."""

    text: list[int]
    model: Any  # causal or encoder-decoder; its cache is the row's own

    def twin(self) -> Alone:
        """A copy of the row."""
        model = copy.copy(self.model)
        model.cache = copy.deepcopy(self.model.cache)
        return Alone(list(self.text), model)


class ExactModel:
    """Model protocol over `model` on torch; a pass runs its whole width even for one token.

    Raises RefusedError where rows cannot be rolled back one by one, and for experts: the shapes of
    their products, and so the rounding, follow how many tokens chose them.
    """

    runtime = "transformers, exact shapes"
    batch_invariant = True
    takes_tensors = False  # a pass begins with tokens from before the block

    def __init__(self, model: PreTrainedModel) -> None:
        if has_experts(model):
            raise unsteady(model)
        self.model = model
        self.encoder_decoder = bool(model.config.is_encoder_decoder)
        self.empty = (Seq2SeqModel if self.encoder_decoder else CausalModel)(model)
        self.device, self.computed = self.empty.device, self.empty.computed
        self.vocab_size = self.empty.vocab_size
        self.context, self.source_context = self.empty.context, self.empty.source_context
        self.source_vocab_size = self.empty.source_vocab_size
        self.rows: list[Alone] = []
        self.padding = 0

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        if self.encoder_decoder and prompts:
            check_sources(prompts, sources, self.source_context)
        fresh: list[Alone] = []
        for b, prompt in enumerate(prompts):
            row = Alone([], copy.copy(self.empty))
            row.model.start([[]], sources and [sources[b]])
            self._extend(row, prompt, 0)
            fresh.append(row)
        self.rows += fresh

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        check_room([len(row.text) for row in self.rows], [len(b) for b in blocks], self.context)
        shape = len(blocks), max(need, default=0), self.vocab_size
        logits = torch.zeros(shape, dtype=self.model.dtype, device=self.device)
        self.padding = 0
        for b, (row, block, n) in enumerate(zip(self.rows, blocks, need, strict=True)):
            logits[b, :n] = self._extend(row, block, n)
        return logits

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths([len(row.text) for row in self.rows], lengths)
        for row, length in zip(self.rows, lengths, strict=True):
            del row.text[length:]

    @torch.inference_mode()
    def permute(self, rows: list[int]) -> None:
        used: set[int] = set()
        old, self.rows = self.rows, []
        for row in rows:
            self.rows.append(old[row].twin() if row in used else old[row])
            used.add(row)

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self.rows), rows))

    def _extend(self, row: Alone, block: list[int], need: int) -> Tensor:
        """Logits `[need, V]` of the last tokens of `block`, which joins the row."""
        begin = len(row.text) // WIDTH * WIDTH
        row.text += block
        self.padding -= len(block)
        first = len(row.text) - need
        parts = [row.model.score([[]], [0])[0]]
        for at in range(begin, len(row.text) if block else begin, WIDTH):
            width = WIDTH if self.context is None else min(WIDTH, self.context - at)
            ids = row.text[at : at + width]
            needed = min(at + width, len(row.text)) > first  # else the output layer does not run
            row.model.set_lengths([at])
            self.padding += width
            logits = row.model.score([ids + [0] * (width - len(ids))], [width * needed])[0]
            parts.append(logits[max(0, first - at) : len(ids)])
        return torch.cat(parts)


def steady(model: ExactModel) -> ExactModel:
    """The same model, after a trial; RefusedError where logits depend on later tokens."""
    ids = [(7 * i + 1) % model.vocab_size for i in range(WIDTH)]
    ids = ids[: model.context]
    model.start([[]], [ids[:1]] if model.encoder_decoder else None)
    logits = model.score([ids], [len(ids)])[0]
    for cut in {1, len(ids) // 2, len(ids) - 1} - {0}:
        model.set_lengths([0])
        if not torch.equal(model.score([ids[:cut]], [cut])[0], logits[:cut]):
            raise unsteady(model.model)
    model.leave([0])
    return model


def has_experts(model: PreTrainedModel) -> bool:
    """Tell whether the names of its parts or classes speak of experts or routers."""
    names = (f"{name} {type(part).__name__}".lower() for name, part in model.named_modules())
    return any("expert" in name or "router" in name for name in names)


def unsteady(model: PreTrainedModel) -> RefusedError:
    """The error that says why a model has no exact shapes."""
    return RefusedError(
        f"{type(model).__name__} has no exact shapes: its logits depend on what stands behind a "
        "token in a pass; leave exact_shapes at False"
    )


ON_A_GRID = Form("a grid of passes", ExactModel, instead="leave exact_shapes out")
