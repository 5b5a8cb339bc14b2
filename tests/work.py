"""The operations that a function, or each recordable pass, runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from foretoken.models.graph_pass import GraphPass


class Work(TorchDispatchMode):
    """What is done, and to which shapes."""

    def __init__(self) -> None:
        super().__init__()
        self.done: list[tuple[str, list[tuple[int, ...]]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [x for x in tree_leaves((args, result)) if isinstance(x, torch.Tensor)]
        self.done.append((str(func), [(*x.shape, *x.stride()) for x in tensors]))
        return result


def record_pass_work(monkeypatch: pytest.MonkeyPatch) -> dict[int, list[Any]]:
    """Return the work of each run of each `GraphPass` from now on, by the pass's id; the first run
    of a pass, which its guard watches, is left out."""
    seen: dict[int, list[Any]] = {}
    run = GraphPass.run

    def watch(self: GraphPass, watched: bool = False) -> Any:
        if watched:
            return run(self, watched)
        with Work() as work:
            outputs = run(self)
        seen.setdefault(id(self), []).append(work.done)
        return outputs

    monkeypatch.setattr(GraphPass, "run", watch)
    return seen
