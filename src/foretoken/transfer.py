"""Transfers between host and device: to the device without waiting, to the host in a single copy.

A copy to the host waits for all work that was submitted to the device, so a step makes only one
such copy. For tensors on the CPU, nothing here costs more than the plain torch call.
"""
# torch does not annotate to() and tolist()
# pyright: reportUnknownMemberType=false

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; the host does not wait for the copy."""
    if tensor.device == device:
        return tensor
    if tensor.is_cpu and device.type == "cuda":
        return tensor.contiguous().pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


def to_list(tensor: Tensor) -> list[Any]:
    """Return `tensor.tolist()` with a type, which torch does not declare."""
    return cast(list[Any], tensor.tolist())


def read_lists(*parts: Tensor) -> list[list[Any]]:
    """Return `tolist()` of each tensor, `[B]` or `[B, n]`. Tensors on a device are copied together,
    as float64, which represents ids exactly."""
    if all(part.is_cpu for part in parts):
        return [cast(list[Any], part.tolist()) for part in parts]
    device = next(part.device for part in parts if not part.is_cpu)
    numbers = torch.cat([send(part, device).double().flatten() for part in parts]).tolist()
    lists: list[list[Any]] = []
    start = 0
    for part in parts:
        kind = float if part.is_floating_point() else int
        flat = list(map(kind, cast(list[float], numbers[start : start + part.numel()])))
        width = part.shape[1] if part.ndim == 2 else 0
        rows = [flat[b * width : (b + 1) * width] for b in range(len(part))]
        lists.append(rows if part.ndim == 2 else flat)
        start += part.numel()
    return lists
