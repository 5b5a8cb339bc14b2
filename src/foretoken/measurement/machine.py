"""The machine that the clock ran on: a description, its memory bandwidth, peak memory, and what its
processor can do.

Times of different machines do not compare, so every saved measurement names its own. Linux tells
instructions in a file; elsewhere only the name and the number of cores are known.
"""

from __future__ import annotations

import os
import platform
import sys
from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.loading.memory import get_free_bytes
from foretoken.storage.cache import get_versions
from foretoken.timing import Spread, summarize, time_in_turns

try:
    import resource
except ImportError:  # Windows has none
    resource = None

BANDWIDTH_READ_BYTES = 2**29  # far beyond any cache
NUM_BANDWIDTH_READS = 7


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


def get_machine(device: torch.device) -> Machine:
    """The machine that this process runs on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cpu = _read_cpuinfo().get("model name") or platform.processor() or platform.machine()
    return Machine(cpu, count_cores(), torch.get_num_threads(), gpu, get_versions())


def count_cores() -> int:
    """Number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_bandwidth(device: torch.device) -> tuple[Spread, int]:
    """Seconds of one read of a large tensor by all cores, and its bytes."""
    free = get_free_bytes(device)
    size = BANDWIDTH_READ_BYTES if free is None else min(BANDWIDTH_READ_BYTES, free // 4)
    numbers = torch.ones(max(1, size // 4), device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, count_cores()))  # beside other runtimes torch has but one
    try:
        seconds = time_in_turns({"read": lambda: numbers.sum().item()}, NUM_BANDWIDTH_READS)["read"]
    finally:
        torch.set_num_threads(threads)
    return summarize(seconds), numbers.numel() * 4


def get_peak_bytes(device: torch.device) -> int:
    """The most memory that this process has held, on the device if it has its own."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    assert resource is not None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # others count in kB


def _read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Read what Linux tells of the first processor; nothing elsewhere."""
    try:
        first = path.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


# By what computes: the kernel's name of a flag, and the maker's
CPU_FEATURE_NAMES = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",  # products of eight bits
    "avx512f": "AVX512",
    "avx512_vnni": "AVX512-VNNI",
    "avx512_bf16": "AVX512-BF16",
    "avx512_fp16": "AVX512-FP16",
    "amx_tile": "AMX",
    "amx_int8": "AMX-INT8",
    "amx_bf16": "AMX-BF16",
    "asimddp": "DOTPROD",  # Arm's
    "i8mm": "I8MM",
    "bf16": "BF16",
    "sve": "SVE",
}
# Flags that the reader looks for: named also where they are missing
REPORTED_CPU_FEATURES = ("AVX512-BF16", "AVX512-VNNI", "AMX")


@dataclass(frozen=True, slots=True)
class Processor:
    """Its name, the threads that this process may use, and what it can do; None: not known."""

    name: str
    threads: int
    abilities: list[str] | None

    @property
    def lacks(self) -> list[str]:
        """The abilities that are sought and missing, where that is known and it is not Arm's."""
        abilities = self.abilities or []
        return (
            [name for name in REPORTED_CPU_FEATURES if name not in abilities]
            if "AVX2" in abilities
            else []
        )


def get_processor(info: Path = Path("/proc/cpuinfo")) -> Processor:
    """The processor that this process runs on."""
    facts, cpuinfo = get_machine(torch.device("cpu")), _read_cpuinfo(info)
    flags = cpuinfo.get("flags") or cpuinfo.get("Features")
    abilities = None
    if flags:
        abilities = [name for flag, name in CPU_FEATURE_NAMES.items() if flag in flags.split()]
    return Processor(facts.cpu, facts.cores, abilities)
