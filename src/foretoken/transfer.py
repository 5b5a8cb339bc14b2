"""Between the host and a device: numbers go there without a wait, and come back in one read.

A host that reads from a device waits for all work handed to it, so a step reads once. On a CPU
nothing here costs more than the plain call. Knows no models and no distributions.
"""
# torch leaves the types of to() and tolist() open
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """`tensor` on `device`; the host goes on at once."""
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and device.type == "cuda":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_list(tensor: Tensor) -> list[Any]:
    """Return `tensor.tolist()`, whose type torch leaves open."""
    return cast(list[Any], tensor.tolist())


def read_lists(*parts: Tensor) -> list[list[Any]]:
    """Return `part.tolist()` of each, `[B]` or `[B, n]`, by one read. From a device they come as
    float64, in which ids are exact."""
    if all(part.is_cpu for part in parts):
        return [cast(list[Any], part.tolist()) for part in parts]
    device = next(part.device for part in parts if not part.is_cpu)
    numbers = torch.cat([send(part, device).double().flatten() for part in parts]).tolist()
    lists: list[list[Any]] = []
    at = 0
    for part in parts:
        kind = float if part.is_floating_point() else int
        flat = list(map(kind, cast(list[float], numbers[at : at + part.numel()])))
        width = part.shape[1] if part.ndim == 2 else 0
        rows = [flat[b * width : (b + 1) * width] for b in range(len(part))]
        lists.append(rows if part.ndim == 2 else flat)
        at += part.numel()
    return lists
