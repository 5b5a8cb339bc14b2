"""The machine, and what its processor can do."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from foretoken.measurement import machine
from foretoken.measurement.machine import get_processor

CPU = torch.device("cpu")


def test_a_description():
    facts = machine.get_machine(CPU)
    assert facts.cpu and facts.gpu is None
    assert facts.cores == machine.count_cores() >= 1 and facts.threads == torch.get_num_threads()
    assert facts.versions["torch"] == version("torch") and "foretoken" in facts.versions
    assert machine.get_machine(CPU) == facts


def test_a_read_of_memory(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(machine, "BANDWIDTH_READ_BYTES", 2**20)
    threads = torch.get_num_threads()
    read, size = machine.measure_bandwidth(CPU)
    assert size == 2**20 and read.n == machine.NUM_BANDWIDTH_READS and read.median > 0
    assert torch.get_num_threads() == threads
    assert 10**7 < machine.get_peak_bytes(CPU)


def info(folder: Path, line: str) -> Path:
    (folder / "cpuinfo").write_text(f"processor\t: 0\nmodel name\t: a cpu\n{line}\n\n{line}\n")
    return folder / "cpuinfo"


def test_flags(tmp_path: Path) -> None:
    flags = "flags\t\t: fpu avx2 avx512f avx512_vnni amx_tile amx_bf16"
    facts = get_processor(info(tmp_path, flags))
    assert facts.abilities == ["AVX2", "AVX512", "AVX512-VNNI", "AMX", "AMX-BF16"]
    assert facts.lacks == ["AVX512-BF16"] and facts.threads == machine.count_cores()
    assert get_processor(info(tmp_path, "flags : fpu")).abilities == []


def test_arm_lacks_nothing_of_another_makers(tmp_path: Path) -> None:
    facts = get_processor(info(tmp_path, "Features\t: fp asimddp i8mm bf16"))
    assert facts.abilities == ["DOTPROD", "I8MM", "BF16"] and facts.lacks == []


def test_what_the_system_does_not_say_is_not_guessed(tmp_path: Path) -> None:
    facts = get_processor(tmp_path / "none")
    assert facts.abilities is None and facts.lacks == [] and facts.name and facts.threads >= 1
    assert get_processor(info(tmp_path, "bogomips : 1")).abilities is None
