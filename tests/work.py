"""The operations that a function runs."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


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
