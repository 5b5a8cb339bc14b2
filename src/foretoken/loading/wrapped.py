"""The network inside a wrapper: models in memory come as training and torch.compile leave them."""

from __future__ import annotations

from foretoken.errors import InputError
from foretoken.loading.sources import in_memory

# Wrappers that change neither weights nor what is computed, and where they keep the network
WRAPPERS = {
    "torch._dynamo.eval_frame.OptimizedModule": "_orig_mod",
    "torch.nn.parallel.data_parallel.DataParallel": "module",
    "torch.nn.parallel.distributed.DistributedDataParallel": "module",
}


def unwrapped(model: object, name: str) -> object:
    """The network that torch.compile, DataParallel or DistributedDataParallel wrapped; anything
    else as it is. `name`: of the argument, for an error.

    Raises InputError, with the remedy, for an adapter's wrapper, whose weights are not the
    network's, and for a pipeline.
    """
    while inside := WRAPPERS.get(f"{type(model).__module__}.{type(model).__qualname__}"):
        model = getattr(model, inside)
    if in_memory(model) or isinstance(model, type) or hasattr(model, "propose"):
        return model
    kind = type(model).__name__
    if hasattr(model, "merge_and_unload"):
        raise InputError(
            f"{name} is a {kind}, a model with an adapter beside it; merge it first: "
            f"give {name}.merge_and_unload()"
        )
    if in_memory(getattr(model, "model", None)):
        raise InputError(f"{name} is a {kind} around a model; give {name}.model")
    return model
