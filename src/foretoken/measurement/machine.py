"""The machine of a measurement: its description, memory bandwidth, peak memory, and the instruction
sets of its processor.

Times on different machines cannot be compared, so every saved measurement includes its machine. The
instruction sets are known on Linux only.
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

BANDWIDTH_READ_BYTES = 2**29  # much larger than any cache
NUM_BANDWIDTH_READS = 7


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine and its software. Only measurements with equal instances can be compared."""

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
    """Return the machine that this process runs on."""
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    cpu = _read_cpuinfo().get("model name") or platform.processor() or platform.machine()
    return Machine(cpu, count_cores(), torch.get_num_threads(), gpu, get_versions())


def count_cores() -> int:
    """Return the number of cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def measure_bandwidth(device: torch.device) -> tuple[Spread, int]:
    """Read a large tensor several times with all cores. Return the seconds that a read took, and
    the tensor's size in bytes."""
    free = get_free_bytes(device)
    size = BANDWIDTH_READ_BYTES if free is None else min(BANDWIDTH_READ_BYTES, free // 4)
    numbers = torch.ones(max(1, size // 4), device=device)
    threads = torch.get_num_threads()
    torch.set_num_threads(max(threads, count_cores()))  # torch may have been set to one thread
    try:
        seconds = time_in_turns({"read": lambda: numbers.sum().item()}, NUM_BANDWIDTH_READS)["read"]
    finally:
        torch.set_num_threads(threads)
    return summarize(seconds), numbers.numel() * 4


def get_peak_bytes(device: torch.device) -> int:
    """Return the peak memory of this process in bytes: GPU memory if `device` is a GPU, otherwise
    main memory."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    assert resource is not None
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024  # Linux counts in KiB


def _read_cpuinfo(path: Path = Path("/proc/cpuinfo")) -> dict[str, str]:
    """Return the fields of the first processor in /proc/cpuinfo; {} on other systems."""
    try:
        first = path.read_text().partition("\n\n")[0]
    except OSError:
        return {}
    pairs = (line.partition(":") for line in first.splitlines())
    return {key.strip(): value.strip() for key, _, value in pairs}


# Linux's name of an instruction set -> the vendor's name
CPU_FEATURE_NAMES = {
    "avx2": "AVX2",
    "avx_vnni": "AVX-VNNI",  # 8-bit products
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
# Instruction sets that are reported also if they are missing
REPORTED_CPU_FEATURES = ("AVX512-BF16", "AVX512-VNNI", "AMX")


@dataclass(frozen=True, slots=True)
class Processor:
    """A processor and its instruction sets."""

    name: str
    threads: int  # hardware threads that this process may use
    abilities: list[str] | None  # instruction sets, by their vendors' names; None: unknown

    @property
    def lacks(self) -> list[str]:
        """The instruction sets in REPORTED_CPU_FEATURES that an x86 processor lacks; [] on Arm, or
        if unknown."""
        abilities = self.abilities or []
        return (
            [name for name in REPORTED_CPU_FEATURES if name not in abilities]
            if "AVX2" in abilities
            else []
        )


def get_processor(info: Path = Path("/proc/cpuinfo")) -> Processor:
    """Return the processor that this process runs on. `info`: the file with its instruction
    sets."""
    facts, cpuinfo = get_machine(torch.device("cpu")), _read_cpuinfo(info)
    flags = cpuinfo.get("flags") or cpuinfo.get("Features")
    abilities = None
    if flags:
        abilities = [name for flag, name in CPU_FEATURE_NAMES.items() if flag in flags.split()]
    return Processor(facts.cpu, facts.cores, abilities)
