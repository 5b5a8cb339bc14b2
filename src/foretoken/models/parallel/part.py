"""What a rank has: its shards of every network that is spread, and the calls on them.

All ranks make the same calls in the same order, so their caches hold the same rows, each the keys
and values of its own heads.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist
from transformers import PreTrainedModel

from foretoken.models.parallel.sharding import Mesh
from foretoken.models.stock.causal import CausalModel

EVER = timedelta(days=3650)  # ranks wait for rank 0, which may be idle for long


class Call(NamedTuple):
    """What rank 0 asks of all."""

    number: int  # of a model
    method: str  # of `Part` where it makes the model, else of the model
    args: tuple[Any, ...]
    gone: tuple[int, ...]  # numbers of models that rank 0 has no use for any more

    @property
    def makes(self) -> bool:
        """Whether it makes a model."""
        return self.method == "take"


def join(store: Path, rank: int, ranks: int) -> None:
    """Meet the other ranks, by a file on this machine."""
    method = f"file://{store}"
    dist.init_process_group("gloo", method, rank=rank, world_size=ranks, timeout=EVER)


def meet() -> None:
    """The same for ranks that torchrun has started, which it tells where."""
    dist.init_process_group("gloo", timeout=EVER)


class Part:
    """This rank's models, by number. All ranks have joined."""

    def __init__(self) -> None:
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.models: dict[int, CausalModel] = {}
        self._mesh = Mesh(self.ranks)

    def play(self, call: Call) -> Any:
        """Make the call, and return what it does."""
        for number in call.gone:
            self.models.pop(number, None)
        if call.makes:
            return self.take(call.number, *call.args)
        return getattr(self.models[call.number], call.method)(*call.args)

    def take(self, number: int, load: Callable[[], PreTrainedModel]) -> None:
        """Keep this rank's shards of what `load` returns, which is whole: one rank after the other,
        as several at once might not fit."""
        for turn in range(self.ranks):
            if turn == self.rank:
                self.models[number] = CausalModel(self._mesh.shard(load()))
            dist.barrier()
