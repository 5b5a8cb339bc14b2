"""A ragged cache whose tensors stay where they are, for forwards of fixed shapes, and a guard that
names operations which cannot be recorded.

Shapes follow from rows, width and slots, never from the rows' content: every query reads all the
slots, and the mask, made on the device from each row's length, hides all but its own. It does not
know CUDA graphs, tokens or vocabularies.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from foretoken.errors import RefusedError
from foretoken.models.stock.cache import BUCKET, RaggedCache


class FixedCache(RaggedCache):
    """A cache that grows by powers of two and never shrinks."""

    def __init__(self, layers: list[Any], device: torch.device) -> None:
        super().__init__(layers, 0, device)

    @property
    def room(self) -> tuple[int, int]:
        """Rows and slots; when it changes, tensors have moved."""
        return self.rows, self.capacity

    def reserve(self, rows: int, slots: int) -> None:
        """Make room, in powers of two."""
        room = max(self.rows, power(rows)), max(self.capacity, bucket(slots))
        if room != self.room:
            self.grow(*room)

    def lay_out(self, offset: Tensor, width: int, end: int) -> None:
        """Put the block's tokens behind `offset [B]`; its values do not change the operations."""
        self.offset, self.width, self.end = offset, width, end
        self.row = torch.arange(len(offset), device=self.device)[:, None]
        self.slots = offset[:, None] + torch.arange(width, device=self.device)


class Recordable(TorchDispatchMode):
    """Refuses operations whose shapes depend on data or that make the host wait: a graph cannot
    hold them."""

    BARRED = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)

    def __init__(self, owner: str) -> None:
        super().__init__()
        self.whose = owner

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name = str(func)
        if "aten.index" in name:  # its shape depends on data where a mask is an index
            indices = args[1] if isinstance(args[1], list | tuple) else []
            barred = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in indices)
        else:
            barred = any(tag in func.tags for tag in self.BARRED)
        if barred:
            raise RefusedError(
                f"{self.whose} cannot be run in fixed shapes: its work depends on what it computes "
                f"({name}); give runtime='transformers'"
            )
        with self:  # the parts of an operation are checked as well
            result = func.decompose(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {})) if result is NotImplemented else result


def power(n: int) -> int:
    """The smallest power of two from n on; 0 for 0."""
    return 1 << (n - 1).bit_length() if n else 0


def bucket(slots: int) -> int:
    """The smallest capacity for so many slots: 64 times a power of two."""
    return BUCKET * power(-(-slots // BUCKET))


def wide(tokens: int) -> int:
    """The smallest width for so many: 1, 2, 3, 5, 9, 17, .., for gammas of 0 and powers of two."""
    return tokens if tokens < 2 else 1 + power(tokens - 1)
