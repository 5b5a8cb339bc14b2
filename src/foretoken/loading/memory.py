"""Checks, before a model is loaded, that its device exists and has enough free memory for the
weights, whose size follows from the config."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch
from torch import nn

from foretoken.errors import InputError, RefusedError, to_one_line

MEMORY_FACTOR = 1.1  # times the bytes of the weights: leaves room for a short generation
CGROUP_ROOT = Path("/sys/fs/cgroup")
CGROUP_FILES = (  # limit, use, and the entry of memory.stat for reclaimable cached files
    ("memory.max", "memory.current", "inactive_file"),
    ("memory/memory.limit_in_bytes", "memory/memory.usage_in_bytes", "total_inactive_file"),
)


def require_device(name: str) -> torch.device:
    """Return the device of that name. Raises InputError if tensors cannot be made on it."""
    if name is None:
        raise InputError("device is None; give 'cpu' or 'cuda'")
    try:
        device = torch.device(name)
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        raise InputError(f"device {name!r:.60} cannot be used: {to_one_line(error)}") from None
    if device.type == "meta":
        raise InputError("device 'meta' stores no values; give 'cpu' or 'cuda'")
    return device


def count_weight_bytes(model: nn.Module, dtype: torch.dtype) -> int:
    """Return the bytes of the weights in `dtype`; the model may be on the meta device."""
    size = torch.empty(0, dtype=dtype).element_size()
    return sum(p.numel() for p in model.parameters()) * size


def get_free_bytes(device: torch.device) -> int | None:
    """Return the bytes that can still be allocated, within the control group's limit; None if
    unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    available, group = psutil.virtual_memory().available, _get_cgroup_free_bytes()
    return available if group is None else min(available, group)


def require_memory(name: str, num_bytes: int, device: torch.device) -> None:
    """Raise RefusedError, which states both sizes, if `num_bytes` of weights times MEMORY_FACTOR
    exceed the free memory of the device. `name`: name of the model, for the message."""
    free = get_free_bytes(device)
    if free is not None and num_bytes * MEMORY_FACTOR > free:
        raise RefusedError(
            f"{name} needs {num_bytes * MEMORY_FACTOR / 1e9:.1f} GB ({num_bytes / 1e9:.1f} GB of "
            f"weights), but {free / 1e9:.1f} GB are free on {device}; give a smaller model or "
            "dtype='bfloat16'"
        )


def _get_cgroup_free_bytes() -> int | None:
    """Return the bytes that this process's control group, version 2 or 1, may still allocate; None
    if there is no limit."""
    for limit, used, idle in CGROUP_FILES:
        values = [*_read_lines(CGROUP_ROOT / limit), *_read_lines(CGROUP_ROOT / used)]
        if len(values) == 2 and all(value.isdigit() for value in values):
            stats = dict(
                line.split() for line in _read_lines((CGROUP_ROOT / used).parent / "memory.stat")
            )
            taken = int(values[1]) - int(stats.get(idle, 0))
            return max(0, int(values[0]) - taken)
    return None


def _read_lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []
