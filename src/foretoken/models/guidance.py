"""Classifier-free guidance (Ho and Salimans, arXiv 2207.12598; for language models: Sanchez et al.,
arXiv 2306.17806): a model whose logits at each position combine two logits, after the prompt and
after a negative prompt, both followed by the same output tokens.

Drafters and verifiers use a guided model like any other model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain

import torch
from torch import Tensor

from foretoken.errors import InputError, RefusedError, format_value, to_float
from foretoken.models.base import Blocks, Model
from foretoken.models.row_slots import list_remaining_rows

MAX_ABS_SCALE = 1000  # keeps logits far from the limits of float32


@dataclass(slots=True)
class GuidedSequence:
    """The length in tokens of a sequence's prompt (0: not known yet), and of the whole sequence."""

    prompt: int
    length: int = 0


class GuidedModel(Model):
    """A decoder-only model under guidance. Its logits are c + (scale - 1) (c - u), with the inner
    model's logits c after the sequence itself, and u after the prompt `negative` followed by the
    same output tokens.

    Sequence b occupies rows 2b and 2b + 1 of the inner model. `negative` None: the negative prompt
    is the prompt's last token, as with transformers' `guidance_scale`. Raises InputError for an
    invalid scale or a negative prompt that is too long, RefusedError for a model with an encoder.
    """

    def __init__(self, model: Model, scale: float, negative: Sequence[int] | None = None) -> None:
        if model.encoder_decoder:
            raise RefusedError(
                "guidance needs two prompts, but an encoder takes one; leave guidance out"
            )
        if model.needs_media:
            problem = "guidance takes token ids only, but this model needs an image or audio"
            raise RefusedError(f"{problem}; leave out guidance")
        self.inner, self.scale, self.negative = model, to_float(scale), [*(negative or ())]
        if not abs(self.scale) <= MAX_ABS_SCALE:  # NaN included
            raise InputError(
                f"scale is {format_value(scale)}; give a number from -{MAX_ABS_SCALE} to "
                f"{MAX_ABS_SCALE} (1: no guidance)"
            )
        self.holds = (model,)
        self.vocab_size, self.device = model.vocab_size, model.device
        self.max_shared_width = model.max_shared_width
        self.runtime, self.compute_dtype = model.runtime, model.compute_dtype
        if model.context is not None:  # the sequence with the negative prompt may be the longer one
            self.context = model.context - self._negative_length + 1
            if self.context < 2:
                raise InputError(
                    f"negative has {self._negative_length} tokens, the model holds "
                    f"{model.context}; give a shorter negative prompt"
                )
        self.seqs: list[GuidedSequence] = []
        self._prompt_lengths: list[int] = []  # of the sequences that join next

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
                raise RefusedError("guidance has no prompt_logprobs; leave out one of the two")
        both = self._interleave_blocks(self.seqs, blocks)
        logits = self.inner.score(both, [n for count in need for n in (count, count)])
        self.padding = self.inner.padding
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        c, u = logits[0::2], logits[1::2]
        # if c and u are both -inf, the formula would give NaN
        return torch.where(c.isneginf(), c, c + (self.scale - 1) * (c - u))

    def set_lengths(self, lengths: list[int]) -> None:
        for seq, length in zip(self.seqs, lengths, strict=True):
            seq.length = length
        pairs = [(seq.length, self._count_second_tokens(seq)) for seq in self.seqs]
        self.inner.set_lengths([*chain.from_iterable(pairs)])

    def permute(self, rows: list[int]) -> None:
        self.seqs = [replace(self.seqs[b]) for b in rows]
        self.inner.permute([n for b in rows for n in (2 * b, 2 * b + 1)])

    def leave(self, rows: list[int]) -> None:
        self.seqs = [self.seqs[b] for b in list_remaining_rows(len(self.seqs), rows)]
        self.inner.leave([n for b in rows for n in (2 * b, 2 * b + 1)])

    def count_padded_positions(self, batch_size: int, width: int) -> int | None:
        positions = self.inner.count_padded_positions(2 * batch_size, width)
        return positions and positions // 2

    @property
    def _negative_length(self) -> int:
        return len(self.negative) or 1

    def _count_second_tokens(self, seq: GuidedSequence) -> int:
        """Return the number of cached tokens in the sequence's second row, after the negative
        prompt; 0 while the prompt is incomplete."""
        complete = seq.prompt and seq.length >= seq.prompt
        return self._negative_length + seq.length - seq.prompt if complete else 0

    def _interleave_blocks(
        self, seqs: list[GuidedSequence], blocks: list[list[int]]
    ) -> list[list[int]]:
        """Return the inner model's blocks: for each sequence, its own block and the block of its
        second row, which has the negative prompt. Adds the blocks to the sequences' lengths."""
        both: list[list[int]] = []
        for seq, block in zip(seqs, blocks, strict=True):
            both += [block, self._make_second_block(seq, block)]
            seq.length += len(block)
        return both

    def _make_second_block(self, seq: GuidedSequence, block: list[int]) -> list[int]:
        last = seq.prompt - 1 - seq.length  # index of the prompt's last token in the block
        if last < 0 < seq.prompt:
            return block
        if not seq.prompt or last >= len(block):
            return []
        return [*(self.negative or block[last : last + 1]), *block[last + 1 :]]
