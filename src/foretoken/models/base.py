"""What a model is to the step: something that scores blocks of new tokens for rows of different
lengths.

A row's length is the number of tokens that are in its cache. Rows are numbered by their place in
the batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor

from foretoken.errors import InputError

Blocks = list[list[int]] | Tensor


def counts_of(blocks: Blocks, need: list[int]) -> list[int]:
    """How many tokens each row gains."""
    return need if isinstance(blocks, Tensor) else [len(block) for block in blocks]


class Model(Protocol):
    """The same for a target and for a draft."""

    vocab_size: int  # rows of the output layer, padding included
    context: int | None  # tokens a row can hold; None: no limit
    encoder_decoder: bool
    source_context: int | None  # tokens the encoder can read; None: no limit, or no encoder
    source_vocab_size: int | None  # ids the encoder knows; None: no encoder
    runtime: str  # what it runs on, for reports
    computed: str  # the dtype of its arithmetic: "float32", "bfloat16", "int8", ...
    device: torch.device
    takes_tensors: bool  # blocks may come as a tensor: the host need not know their tokens

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        """Rows join behind those present, with all of `prompts` in the cache (an empty prompt is
        allowed).

        `sources`: what the encoder reads, once, where there is one.
        """
        ...

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        """Append block b to row b, for all rows, in one run; a block may be empty.

        As a tensor `[B, W]` on the model's device, padded on the right with any ids, the blocks
        are its rows' first need[b] tokens: all are needed.

        Returns logits `[B, max(need), V]`: in row b the first need[b] positions are those of the
        last need[b] tokens of its block, what follows is finite padding. They hold until the next
        run.
        """
        ...

    def set_lengths(self, lengths: list[int]) -> None:
        """Keep this many tokens of each row: commit and rollback in one. No length may grow."""
        ...

    def permute(self, rows: list[int]) -> None:
        """Row b becomes what row rows[b] was; rows may be repeated or left out."""
        ...

    def leave(self, rows: list[int]) -> None:
        """These rows are finished; those behind move up."""
        ...


def hears(model: Model, source: list[int]) -> bool:
    """Whether a model's encoder can read a source: no longer than it may be, of ids it knows."""
    limit, V = model.source_context, model.source_vocab_size
    fits = limit is None or len(source) <= limit
    return fits and V is not None and max(source, default=0) < V


def require_model(value: object) -> None:
    """Raise InputError for what is no model, such as what a model was loaded into."""
    if isinstance(value, type) or not hasattr(value, "score"):
        raise InputError(f"{value!r:.60} is no model; give that of a Speculator: load(...).target")


@dataclass(frozen=True, slots=True)
class Tree:
    """Where new tokens stand in rows whose slots hold trees instead of texts."""

    depths: Tensor  # [B, K], the position of every slot; K: the longest row and the longest block
    seen: Tensor  # [B, W, K], True where new token i sees a slot: its ancestors and itself


@runtime_checkable
class TreeModel(Model, Protocol):
    """A model that can score many continuations of a row at once, sharing what they share."""

    def score_tree(self, blocks: list[list[int]], tree: Tree) -> Tensor:
        """Append block b to row b, for all rows, in one run; every token sees what `tree` says.

        Returns logits `[B, W, V]` after every token, finite where a block is shorter.
        """
        ...

    def keep(self, slots: list[list[int]]) -> None:
        """Row b keeps these of its slots, which ascend, and closes the gaps."""
        ...


class OpenModel(Model, Protocol):
    """A model that also shows what its output layer reads."""

    @property
    def hidden(self) -> Tensor:
        """`[B, max(need), H]`, at the very positions of the last score's logits; holds until the
        next run."""
        ...
