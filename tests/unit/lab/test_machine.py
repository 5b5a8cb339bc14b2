"""The machine, and what its processor can do."""

from __future__ import annotations

import os
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from foretoken.lab import machine
from foretoken.lab.machine import processor

CPU = torch.device("cpu")


def test_a_description():
    facts = machine.describe(CPU)
    assert facts.cpu and facts.gpu is None
    assert facts.cores == machine.cores() >= 1 and facts.threads == torch.get_num_threads()
    assert facts.versions["torch"] == version("torch") and "foretoken" in facts.versions
    assert machine.describe(CPU) == facts


def test_a_read_of_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    threads = torch.get_num_threads()
    read, size = machine.bandwidth(CPU)
    assert size == 2**20 and read.n == machine.READS and read.median > 0
    assert torch.get_num_threads() == threads


@pytest.fixture
def cpus(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four threads of two cores, of which this process may use three; a cache of 32 MiB."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2}, raising=False)
    for i in range(4):
        siblings = tmp_path / f"cpu{i}" / "topology" / "thread_siblings_list"
        siblings.parent.mkdir(parents=True)
        siblings.write_text("0,2" if i % 2 == 0 else "1,3")
    for i, size in enumerate(["48K", "2048K", "32M"]):
        file = tmp_path / "cpu0" / "cache" / f"index{i}" / "size"
        file.parent.mkdir(parents=True)
        file.write_text(size + "\n")
    return tmp_path


def info(folder: Path, line: str) -> Path:
    (folder / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: a cpu\n{line}\n\n{line}\n")
    return folder / "cpuinfo"


def test_flags_cores_and_the_last_cache(cpus: Path) -> None:
    facts = processor(info(cpus, "flags\t\t: fpu avx2 avx512f avx512_vnni amx_tile amx_bf16"), cpus)
    assert facts.abilities == ["AVX2", "AVX512", "AVX512-VNNI", "AMX", "AMX-BF16"]
    assert facts.lacks == ["AVX512-BF16"]
    assert (facts.threads, facts.cores, facts.cache_bytes) == (3, 2, 2**25)


def test_arm_lacks_nothing_of_another_makers(cpus: Path) -> None:
    facts = processor(info(cpus, "Features\t: fp asimddp i8mm bf16"), cpus)
    assert facts.abilities == ["DOTPROD", "I8MM", "BF16"] and facts.lacks == []


def test_what_the_system_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    facts = processor(tmp_path / "none", tmp_path)
    assert facts.abilities is facts.cores is facts.cache_bytes is None and facts.lacks == []
    assert processor(info(tmp_path, "bogomips : 1"), tmp_path).abilities is None
    assert facts.name and facts.threads >= 1
