"""The machine that the clock ran on: a description, its memory bandwidth, and peak memory.

Times of different machines do not compare, so every saved measurement names its own.
"""

from __future__ import annotations

import os
import platform
import resource
import sys
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter

import torch

from foretoken.lab.estimate import Spread, spread
from foretoken.loading.memory import free_bytes
from foretoken.storage.lineage import versions

READ_BYTES = 2**29  # far beyond any cache
READS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """Measurements compare where these are equal."""

    cpu: str
    cores: int
    threads: int  # torch's
    gpu: str | None
    versions: dict[str, str]  # of the libraries that results depend on

    def __str__(self) -> str:
        parts = [
            self.cpu,
            f"{self.cores} cores",
            f"{self.threads} thread{'s' * (self.threads != 1)}",
        ]
        parts += [self.gpu] if self.gpu else []
        return ", ".join([*parts, *(f"{name} {v}" for name, v in self.versions.items())])


def describe(device: torch.device) -> Machine:
    """The machine that this process runs on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return Machine(_cpu(), cores(), torch.get_num_threads(), gpu, versions())


def cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def bandwidth(device: torch.device) -> tuple[Spread, int]:
    """Seconds of one read of a large tensor by all cores, and its bytes."""
    free = free_bytes(device)
    size = READ_BYTES if free is None else min(READ_BYTES, free // 4)
    numbers = torch.ones(max(1, size // 4), device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, cores()))  # beside other runtimes torch has but one
    try:
        seconds = [_read_seconds(numbers) for _ in range(1 + READS)][1:]  # the first is a warm-up
    finally:
        torch.set_num_threads(threads)
    read = spread(seconds)
    assert read is not None
    return read, numbers.numel() * 4


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held, on the device if it has its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024


def _read_seconds(numbers: torch.Tensor) -> float:
    start = perf_counter()
    numbers.sum().item()
    return perf_counter() - start


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
