"""Classifier-free guidance (Ho and Salimans, arXiv 2207.12598; of language models: Sanchez et al.,
arXiv 2306.17806): a model whose logits are mixed from two readings of a text, one behind its prompt
and one behind another prompt.

The mixture is the model's distribution like any other, so whatever drafts and verifies need not
know of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError, as_float, shown
from foretoken.models.base import Blocks, Model
from foretoken.models.rows import staying

MOST = 1000  # of a scale: logits stay far from what float32 holds


@dataclass(slots=True)
class GuidedRow:
    """A row: tokens of its prompt, 0 until they are known, and tokens that it holds."""

    prompt: int
    length: int = 0


class Guided(Model):
    """A decoder-only model under guidance: logits c + (scale - 1) (c - u), of c behind a row's
    prompt and u behind `negative`, the same new tokens following both. Each row is two neighbours
    in the model's passes. `negative` None: the prompt's last token, as transformers'
    `guidance_scale` has it.

    Raises InputError for a scale that is no number and a prompt that is too long, RefusedError for
    a model with an encoder.
    """

    def __init__(self, model: Model, scale: float, negative: Sequence[int] | None = None) -> None:
        if model.encoder_decoder:
            raise RefusedError("guidance reads two prompts, and an encoder one; leave it out")
        if model.needs_media:
            problem = "guidance reads ids alone, and this model none without a sound or picture"
            raise RefusedError(f"{problem}; leave it out")
        self.inner, self.scale, self.negative = model, as_float(scale), [*(negative or ())]
        if not abs(self.scale) <= MOST:  # NaN included
            raise InputError(
                f"scale is {shown(scale)}; give one from -{MOST} to {MOST}, 1 being no guidance"
            )
        self.holds = (model,)
        self.vocab_size, self.device = model.vocab_size, model.device
        self.runtime, self.computed = model.runtime, model.computed
        if model.context is not None:  # the second reading may be the longer one
            self.context = model.context - self._beginning + 1
            if self.context < 2:
                raise InputError(
                    f"negative has {self._beginning} tokens, the model holds {model.context}; give "
                    "a shorter prompt"
                )
        self.rows: list[GuidedRow] = []
        self._prompts: list[int] = []  # lengths of those of the rows that join next

    def prompted(self, lengths: list[int]) -> None:
        self._prompts = lengths

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        lengths, self._prompts = self._prompts or [0] * len(prompts), []
        fresh = [GuidedRow(length) for length in lengths]
        self.inner.start(self._twice(fresh, prompts))
        self.rows = self.rows + fresh

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        for row, block, n in zip(self.rows, blocks, need, strict=True):
            if n and not row.prompt:
                row.prompt = row.length + len(block) - n + 1
            if n and row.length + len(block) - n + 1 < row.prompt:
                raise RefusedError("a prompt has no likelihoods under guidance; leave them out")
        both = self._twice(self.rows, blocks)
        logits = self.inner.score(both, [n for count in need for n in (count, count)])
        self.padding = self.inner.padding
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        c, u = logits[0::2], logits[1::2]
        # an impossible token stays so: it may be impossible in both readings
        return torch.where(c.isneginf(), c, c + (self.scale - 1) * (c - u))

    def set_lengths(self, lengths: list[int]) -> None:
        for row, length in zip(self.rows, lengths, strict=True):
            row.length = length
        pairs = [(row.length, self._second_length(row)) for row in self.rows]
        self.inner.set_lengths([*chain.from_iterable(pairs)])

    def permute(self, rows: list[int]) -> None:
        self.rows = [replace(self.rows[b]) for b in rows]
        self.inner.permute([n for b in rows for n in (2 * b, 2 * b + 1)])

    def leave(self, rows: list[int]) -> None:
        self.rows = [self.rows[b] for b in staying(len(self.rows), rows)]
        self.inner.leave([n for b in rows for n in (2 * b, 2 * b + 1)])

    @property
    def _beginning(self) -> int:
        """Tokens of the other prompt."""
        return len(self.negative) or 1

    def _second_length(self, row: GuidedRow) -> int:
        """Count the tokens of a row's second reading, which begins with the prompt's last."""
        read = row.prompt and row.length >= row.prompt
        return self._beginning + row.length - row.prompt if read else 0

    def _twice(self, rows: list[GuidedRow], blocks: list[list[int]]) -> list[list[int]]:
        """Append the blocks to the rows; each, and behind it what its second reading gains."""
        both: list[list[int]] = []
        for row, block in zip(rows, blocks, strict=True):
            both += [block, self._second(row, block)]
            row.length += len(block)
        return both

    def _second(self, row: GuidedRow, block: list[int]) -> list[int]:
        last = row.prompt - 1 - row.length  # where the prompt's last token stands in the block
        if last < 0 < row.prompt:
            return block
        if not row.prompt or last >= len(block):
            return []
        return [*(self.negative or block[last : last + 1]), *block[last + 1 :]]
