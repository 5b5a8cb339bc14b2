"""What models of every runtime share: checks of rows and sources, and blocks as one tensor. Does
not know transformers, whose import takes seconds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from foretoken.errors import InputError
from foretoken.models.base import Blocks
from foretoken.transfer import sent

CHUNK = 512  # tokens of a prompt in one run: bounds the memory of a prefill
BEYOND = 2**24  # added to positions in a long row of a model that `Switches`


def staying(rows: int, leaving: list[int]) -> list[int]:
    """Of so many rows those that do not leave."""
    places = set(leaving)
    return [b for b in range(rows) if b not in places]


def check_lengths(old: list[int], new: list[int]) -> None:
    if len(old) != len(new) or any(not 0 <= n <= o for o, n in zip(old, new, strict=True)):
        raise InputError(f"lengths {new} of rows that hold {old} tokens: a row can only go back")


def check_room(
    lengths: list[int], counts: list[int], context: int | None | list[int | None]
) -> None:
    """Raise InputError for a row that would hold more than `context` tokens, which may be each
    row's own; None: no limit."""
    if len(lengths) != len(counts):
        raise InputError(f"{len(counts)} blocks for {len(lengths)} rows: give one per row")
    if context is None:
        return
    limits = context if isinstance(context, list) else [context] * len(lengths)
    for b, (n, count, limit) in enumerate(zip(lengths, counts, limits, strict=True)):
        if limit is not None and n + count > limit and count:
            raise InputError(
                f"row {b} would hold {n + count} tokens, the model {limit}: shorten it"
            )


def padded(blocks: Blocks, device: torch.device, width: int = 0) -> Tensor:
    """Blocks as ids `[B, width]`, padded on the right with id 0, to which no real token attends.

    `width`: at least this; a block that is longer widens it.
    """
    if isinstance(blocks, Tensor):
        return functional.pad(blocks, (0, width - blocks.shape[1])) if width else blocks
    width = max(width, max(map(len, blocks), default=0))
    rows = [b + [0] * (width - len(b)) for b in blocks]
    return sent(torch.tensor(rows, dtype=torch.long), device)


def check_sources(
    prompts: list[list[int]], sources: list[list[int]] | None, context: int | None
) -> None:
    if sources is None or len(sources) != len(prompts) or not all(sources):
        raise InputError("an encoder-decoder model needs one non-empty source for each prompt")
    longest = max(map(len, sources))
    if context is not None and longest > context:
        raise InputError(f"a source of {longest} tokens, the encoder takes {context}: shorten it")
