"""Pieces of prompts that share a recorded forward pass, and the results of several passes.

A pass over all slots is as wide as its longest block. So a piece of a prompt would make every
decoding sequence pay for as many positions. Pieces of prompts therefore run in passes over their
own slots only. The sizes of the pieces of a pass round up to the same width, and the number of
pieces is a power of two. So few recordings suffice, and no pass has empty sequences as padding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from foretoken.models.row_slots import PREFILL_CHUNK_TOKENS, round_up_to_power_of_two

MIN_PROMPT_WIDTH = 64
# limits for all pieces of a pass together, because a recording never frees its memory
MAX_PROMPT_POSITIONS = 8 * PREFILL_CHUNK_TOKENS
MAX_PROMPT_KEYS = 1 << 16


class PromptPiece(NamedTuple):
    """Tokens of a block that run in one pass."""

    row: int  # of its sequence
    start: int  # tokens of the block before the piece
    size: int
    needed: range  # positions of the block that need logits, in this piece
    first_needed: int  # the block's first position that needs logits


def cut_piece(row: int, start: int, count: int, need: int) -> PromptPiece:
    """Return the piece at token `start` of a block of `count` tokens, of which the last `need` need
    logits."""
    end = min(start + PREFILL_CHUNK_TOKENS, count)
    needed = range(max(start, count - need), end)
    return PromptPiece(row, start, end - start, needed, count - need)


def round_up_prompt_width(tokens: int) -> int:
    """Return the width of the pass over a piece: 64, 128, 256 or 512."""
    return max(MIN_PROMPT_WIDTH, round_up_to_power_of_two(tokens))


def count_prompt_positions(tokens: int) -> int:
    """Return how many positions the passes over a prompt compute."""
    last = tokens % PREFILL_CHUNK_TOKENS
    return tokens - last + (round_up_prompt_width(last) if last else 0)


def group_pieces(pieces: list[PromptPiece], end: int) -> list[tuple[int, list[PromptPiece]]]:
    """Return the passes over these pieces: the width and the pieces of each. end: a power of two
    times 64, at least the number of positions that any of the passes attends to."""
    passes: list[tuple[int, list[PromptPiece]]] = []
    for width in sorted({round_up_prompt_width(piece.size) for piece in pieces}):
        left = [piece for piece in pieces if round_up_prompt_width(piece.size) == width]
        limit = max(1, min(MAX_PROMPT_POSITIONS // width, MAX_PROMPT_KEYS // end))
        while left:
            size = min(1 << (len(left).bit_length() - 1), limit)
            passes.append((width, left[:size]))
            left = left[size:]
    return passes


def list_picks(pieces: list[PromptPiece], width: int, num_picks: int) -> Tensor:
    """Return the flat indices of the needed positions in a pass `[P, width]`: `num_picks` for each
    piece. If it needs fewer, the index of its first position is repeated."""
    picks: list[int] = []
    for i, piece in enumerate(pieces):
        own = [i * width + position - piece.start for position in piece.needed]
        picks += own + [i * width] * (num_picks - len(own))
    return torch.tensor(picks)


class RowOutputs:
    """Logits and hidden states of several passes, for all sequences of a batch.

    Attributes:
        need: For each sequence, the number of positions that need logits.
        logits: `[B, max(need), V]`, 0 at padding; None before the first result.
        hidden: The inputs of the output layer, `[B, max(need), H]`.
    """

    def __init__(self, need: list[int]) -> None:
        self.need = need
        self.logits: Tensor | None = None
        self.hidden: Tensor | None = None

    def put(self, rows: int | slice, first: int, logits: Tensor, hidden: Tensor) -> None:
        """Copy the results of these sequences, `[.., n, V]` and `[.., n, H]`, to their needed
        positions `first` to `first + n - 1`."""
        B, last = len(self.need), first + logits.shape[-2]
        if self.logits is None or self.hidden is None:
            self.logits = logits.new_zeros(B, max(self.need), logits.shape[-1])
            self.hidden = hidden.new_zeros(B, max(self.need), hidden.shape[-1])
        self.logits[rows, first:last], self.hidden[rows, first:last] = logits, hidden

    def put_pieces(self, pieces: list[PromptPiece], logits: Tensor, hidden: Tensor) -> None:
        """Copy the results of a pass over pieces, `[1, N, V]` and `[1, N, H]`, at the N positions
        of `list_picks`."""
        logits, hidden = (x[0].unflatten(0, (len(pieces), -1)) for x in (logits, hidden))
        for i, (row, _, _, needed, first_needed) in enumerate(pieces):
            if needed:
                n = len(needed)
                self.put(row, needed.start - first_needed, logits[i, :n], hidden[i, :n])
