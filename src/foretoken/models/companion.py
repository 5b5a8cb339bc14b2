"""A smaller copy of a model over the model's own rows, with which the model drafts for itself.

It reads the keys and values that the target has made of the text, and writes those of draft tokens
behind them, where the target's next pass writes its own. So there is nothing to read first, nothing
to catch up with, and no second cache. The target never reads what a draft token has left there: its
rows end before it, and its passes write before they read. It does not know how the copy was made.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, Generic, TypeVar

from torch import Tensor

from foretoken.errors import RefusedError
from foretoken.models.base import Blocks, Capabilities, Model
from foretoken.models.rows import check_lengths, check_room, staying

Graph = TypeVar("Graph")


class Host(Model, Generic[Graph]):
    """A model over whose rows other graphs may run."""

    @abstractmethod
    def scored(
        self, graph: Graph, /, past: list[int], blocks: list[list[int]], need: list[int]
    ) -> Tensor:
        """Return logits as `score` does, by `graph`, where row b has past[b] tokens in place; no
        row moves on."""


class Companion(Model, Generic[Graph]):
    """A model over the rows of `target`, which have joined and read before they join here.

    graph: what makes its passes; facts: those of the copy.
    """

    capabilities = Capabilities(target_rows=True, memory=True)
    reads_target = True

    def __init__(self, target: Host[Graph], graph: Graph, facts: dict[str, Any]) -> None:
        self.target, self.graph, self.runtime = target, graph, target.runtime
        self.encoder_decoder, self.vocab_size = target.encoder_decoder, target.vocab_size
        self.context, self.source_context = target.longest, target.source_context
        self.source_vocab_size = target.source_vocab_size
        self.computed: str = facts["computed"]
        identity = facts.get("identity")
        self.identity = identity and f"{identity} over the target's rows"
        self.rewind = target.rewind
        self._own: list[int] = []

    @property
    def lengths(self) -> list[int]:
        """Tokens of every row in place: what the target has read, and draft tokens behind it."""
        return [max(own, read) for own, read in zip(self._own, self.target.lengths, strict=True)]

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self._own += [0] * len(prompts)

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        assert isinstance(blocks, list)
        past = self.lengths
        check_room(past, [len(block) for block in blocks], self.context)
        self._own = [n + len(block) for n, block in zip(past, blocks, strict=True)]
        return self.target.scored(self.graph, past, blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        check_lengths(self.lengths, lengths)
        self._own = list(lengths)

    def permute(self, rows: list[int]) -> None:
        self._own = [self._own[b] for b in rows]

    def leave(self, rows: list[int]) -> None:
        self.permute(staying(len(self._own), rows))


def require_alike(own: object, targets: object) -> None:
    """RefusedError where a copy would keep its keys and values in another form than the target."""
    if own != targets:
        raise RefusedError(
            "the copy of the target would keep its keys and values in another form, and cannot "
            "draft over the target's rows; give draft='lookup', or a model"
        )
