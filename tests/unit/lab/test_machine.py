"""The machine: its description, the bandwidth of its memory, and what a process has used."""

from __future__ import annotations

from importlib.metadata import version

import pytest
import torch

from foretoken.lab import machine

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


def test_peak_memory_never_falls():
    before = machine.peak_bytes(CPU)
    assert 10**7 < before <= machine.peak_bytes(CPU)
