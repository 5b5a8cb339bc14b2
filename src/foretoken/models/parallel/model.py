"""A network over several ranks behind the Model protocol, at rank 0."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from foretoken.models.base import Blocks
from foretoken.models.parallel.ranks import Ranks
from foretoken.models.parallel.sharding import require_plan
from foretoken.models.stock.causal import CausalModel
from foretoken.models.stock.selfcheck import Form


class ParallelModel:
    """Every call is made by all ranks; what it returns is whole on each."""

    encoder_decoder = False
    takes_tensors = False  # blocks are sent to the other ranks
    source_context: int | None = None
    source_vocab_size: int | None = None

    def __init__(
        self, ranks: Ranks, own: Callable[[], PreTrainedModel], theirs: Callable[[], Any]
    ) -> None:
        """own, theirs: return the whole network, at rank 0 and at the others."""
        self._ranks, self._number = ranks, ranks.take(own, theirs)
        ranks.drop(self._number, self)
        mine = self._mine
        self.vocab_size = mine.vocab_size
        self.context, self.longest = mine.context, mine.longest
        self.device, self.computed = mine.device, mine.computed
        self.runtime = f"{mine.runtime} on {ranks.ranks} ranks"

    @property
    def _mine(self) -> CausalModel:
        """Over the shards of rank 0. Its forward alone would wait for the others forever."""
        return self._ranks.part.models[self._number]

    @property
    def identity(self) -> str:
        """What its speed depends on."""
        network = self._mine.model
        facts = [type(network).__qualname__, self.computed, self.runtime, network.config.to_dict()]
        return json.dumps(facts, sort_keys=True, default=str)

    @property
    def padding(self) -> int:
        return self._mine.padding

    @property
    def lengths(self) -> list[int]:
        return self._mine.lengths

    @property
    def long(self) -> list[bool]:
        return self._mine.long

    @property
    def hidden(self) -> Tensor:
        return self._mine.hidden

    def memory(self, lengths: list[int], sources: list[int]) -> int:
        """Bytes at most, in all ranks together."""
        return self._ranks.ranks * self._all("memory", lengths, sources)

    def beyond(self, on: bool) -> None:
        self._all("beyond", on)

    def start(self, prompts: list[list[int]], sources: list[list[int]] | None = None) -> None:
        self._all("start", prompts, sources)

    def score(self, blocks: Blocks, need: list[int]) -> Tensor:
        return self._all("score", blocks, need)

    def set_lengths(self, lengths: list[int]) -> None:
        self._all("set_lengths", lengths)

    def permute(self, rows: list[int]) -> None:
        self._all("permute", rows)

    def leave(self, rows: list[int]) -> None:
        self._all("leave", rows)

    def _all(self, method: str, *args: Any) -> Any:
        return self._ranks.call(self._number, method, *args)


def on_ranks(ranks: Ranks) -> Form:
    """A copy of a network, which the other ranks are sent: what the self-check runs."""

    def copied(network: PreTrainedModel) -> ParallelModel:
        require_plan(network, ranks.ranks)
        copying = partial(copy.deepcopy, network)
        return ParallelModel(ranks, copying, copying)

    heads = max(2, ranks.ranks)  # of the small copy: one for each rank
    return Form(
        f"{ranks.ranks} ranks", copied, heads, switches=True, instead="leave tensor_parallel out"
    )
