"""A target whose weights are over several processes."""

from __future__ import annotations

from functools import partial

import torch

from foretoken.errors import RefusedError
from foretoken.loading.runtimes import Placed, Wish, dtype_of, require_precision
from foretoken.loading.sources import Source


def place_parallel(source: object, wish: Wish, ranks: int) -> Placed:
    """The model over so many processes, this one included, once its family has passed the
    self-check over them.

    The others are started here and read the weights themselves, one after the other. Raises
    RefusedError for a model that cannot be spread.
    """
    if not isinstance(source, Source):
        raise RefusedError(
            f"tensor_parallel is {ranks}, but the target is in this process's memory, which others "
            "cannot read; give its folder or hub id"
        )
    from foretoken.models.parallel.model import ParallelModel, on_ranks  # late: takes seconds
    from foretoken.models.parallel.ranks import start
    from foretoken.models.parallel.sharding import require_plan
    from foretoken.models.stock.selfcheck import self_check

    require_plan(source.empty, ranks)
    dtype = getattr(torch, dtype_of(source, wish))
    network = source.network(dtype, wish.device)  # what is wrong with it is told before others run
    require_precision(network)
    together = start(ranks)
    self_check(source.empty, on_ranks(together))
    again = Source(source.name, source.path, source.options)  # without what this one has read
    model = ParallelModel(together, lambda: network, partial(again.network, dtype, wish.device))
    return Placed(model, "it was asked for")
