"""What this machine's processor can do: its cores, its last cache, and the instructions that a pass
of a model gains from.

Linux says so in files; elsewhere only the name and the number of cores are known.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from foretoken.lab.machine import describe

# By what computes: the kernel's name of a flag, and the maker's
FLAGS = {
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
# That the reader looks for: named also where they are missing
SOUGHT = ("AVX512-BF16", "AVX512-VNNI", "AMX")
CPUS = Path("/sys/devices/system/cpu")


@dataclass(frozen=True, slots=True)
class Processor:
    """None: the system does not say."""

    name: str
    threads: int  # that this process may use
    cores: int | None  # that they are of
    cache_bytes: int | None  # of the last cache
    abilities: list[str] | None

    @property
    def lacks(self) -> list[str]:
        """What is sought and missing, where that is known and it is not Arm's."""
        abilities = self.abilities or []
        return [name for name in SOUGHT if name not in abilities] if "AVX2" in abilities else []


def processor(info: Path = Path("/proc/cpuinfo"), cpus: Path = CPUS) -> Processor:
    """The processor that this process runs on."""
    facts = describe(torch.device("cpu"))
    return Processor(facts.cpu, facts.cores, _cores(cpus), _cache(cpus), _abilities(info))


def _abilities(info: Path) -> list[str] | None:
    try:
        lines = info.read_text().splitlines()
    except OSError:
        return None
    for line in lines:
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            flags = set(value.split())
            return [name for flag, name in FLAGS.items() if flag in flags]
    return None


def _cores(cpus: Path) -> int | None:
    """Cores, of which each may run several threads, that this process may use."""
    try:
        own = sorted(os.sched_getaffinity(0))
        return len({(cpus / f"cpu{i}/topology/thread_siblings_list").read_text() for i in own})
    except (AttributeError, OSError):
        return None


def _cache(cpus: Path) -> int | None:
    """Bytes of the largest cache of one of the processors that this process may use."""
    units = {"K": 2**10, "M": 2**20, "G": 2**30}
    try:
        cpu = min(os.sched_getaffinity(0))
        sizes = [f.read_text().strip() for f in (cpus / f"cpu{cpu}/cache").glob("index*/size")]
        return max(int(size[:-1]) * units[size[-1]] for size in sizes)
    except (AttributeError, OSError, ValueError, KeyError, IndexError):
        return None
