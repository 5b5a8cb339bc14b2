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

from foretoken.errors import InputError, RefusedError, as_float, format_value
from foretoken.models.base import Blocks, Model
from foretoken.models.row_slots import list_remaining_rows

MAX_ABS_SCALE = 1000  # of a scale: logits stay far from what float32 holds


@dataclass(slots=True)
class GuidedSequence:
    """A row: tokens of its prompt, 0 until they are known, and tokens that it holds."""

    prompt: int
    length: int = 0


class GuidedModel(Model):
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
        if not abs(self.scale) <= MAX_ABS_SCALE:  # NaN included
            raise InputError(
                f"scale is {format_value(scale)}; give one from -{MAX_ABS_SCALE} to "
                f"{MAX_ABS_SCALE}, 1 being no guidance"
            )
        self.holds = (model,)
        self.vocab_size, self.device = model.vocab_size, model.device
        self.runtime, self.compute_dtype = model.runtime, model.compute_dtype
        if model.context is not None:  # the second reading may be the longer one
            self.context = model.context - self._negative_length + 1
            if self.context < 2:
                raise InputError(
                    f"negative has {self._negative_length} tokens, the model holds "
                    f"{model.context}; give "
                    "a shorter prompt"
                )
        self.seqs: list[GuidedSequence] = []
        self._prompt_lengths: list[int] = []  # lengths of those of the rows that join next

    def set_prompt_lengths(self, lengths: list[int]) -> None:
        self._prompt_lengths = lengths

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        lengths, self._prompt_lengths = self._prompt_lengths or [0] * len(prompts), []
        new_seqs = [GuidedSequence(length) for length in lengths]
        self.inner.start(self._interleave_blocks(new_seqs, prompts))
        self.seqs = self.seqs + new_seqs

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        for seq, block, n in zip(self.seqs, blocks, need, strict=True):
            if n and not seq.prompt:
                seq.prompt = seq.length + len(block) - n + 1
            if n and seq.length + len(block) - n + 1 < seq.prompt:
                raise RefusedError("a prompt has no likelihoods under guidance; leave them out")
        both = self._interleave_blocks(self.seqs, blocks)
        logits = self.inner.score(both, [n for count in need for n in (count, count)])
        self.padding = self.inner.padding
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        c, u = logits[0::2], logits[1::2]
        # an impossible token stays so: it may be impossible in both readings
        return torch.where(c.isneginf(), c, c + (self.scale - 1) * (c - u))

    def set_lengths(self, lengths: list[int]) -> None:
        for seq, length in zip(self.seqs, lengths, strict=True):
            seq.length = length
        pairs = [(row.length, self._count_second_tokens(row)) for row in self.seqs]
        self.inner.set_lengths([*chain.from_iterable(pairs)])

    def permute(self, rows: list[int]) -> None:
        self.seqs = [replace(self.seqs[b]) for b in rows]
        self.inner.permute([n for b in rows for n in (2 * b, 2 * b + 1)])

    def leave(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[b] for b in list_remaining_rows(len(self.seqs), rows)]
        self.inner.leave([n for b in rows for n in (2 * b, 2 * b + 1)])

    @property
    def _negative_length(self) -> int:
        """Tokens of the other prompt."""
        return len(self.negative) or 1

    def _count_second_tokens(self, seq: GuidedSequence) -> int:
        """Count the tokens of a row's second reading, which begins with the prompt's last."""
        read = seq.prompt and seq.length >= seq.prompt
        return self._negative_length + seq.length - seq.prompt if read else 0

    def _interleave_blocks(
        self, seqs: list[GuidedSequence], blocks: list[list[int]]
    ) -> list[list[int]]:
        """Append the blocks to the rows; each, and behind it what its second reading gains."""
        both: list[list[int]] = []
        for seq, block in zip(seqs, blocks, strict=True):
            both += [block, self._make_second_block(seq, block)]
            seq.length += len(block)
        return both

    def _make_second_block(self, seq: GuidedSequence, block: list[int]) -> list[int]:
        last = seq.prompt - 1 - seq.length  # where the prompt's last token stands in the block
        if last < 0 < seq.prompt:
            return block
        if not seq.prompt or last >= len(block):
            return []
        return [*(self.negative or block[last : last + 1]), *block[last + 1 :]]
