"""What fits is told from the config and what is free, control groups included."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from foretoken.errors import RefusedError
from foretoken.loading import memory
from tiny import llama

CPU = torch.device("cpu")


def group(root: Path, limit: str, used: str, idle: str, *values: int | str) -> None:
    for name, value in zip((limit, used), values, strict=False):
        (root / name).parent.mkdir(exist_ok=True)
        (root / name).write_text(f"{value}\n")
    stat = (root / used).parent / "memory.stat"
    stat.write_text(f"anon 1\n{idle} {values[2]}\nother 7\n")


def test_weights_are_counted_once_and_in_their_dtype():
    free, tied = llama(64), llama(64, tie_word_embeddings=True)
    count = sum(p.numel() for p in free.parameters())
    assert memory.count_weight_bytes(free, torch.float32) == 4 * count
    assert memory.count_weight_bytes(free, torch.bfloat16) == 2 * count
    saved = memory.count_weight_bytes(free, torch.float64) - memory.count_weight_bytes(
        tied, torch.float64
    )
    assert saved == 8 * 64 * 32
    with torch.device("meta"):
        assert memory.count_weight_bytes(llama(64), torch.float32) == 4 * count


def test_free_memory_is_known_here():
    assert 2**20 < memory.get_free_bytes(CPU) < 2**60
    assert memory.get_free_bytes(torch.device("meta")) is None


@pytest.mark.parametrize("version", memory.CGROUP_FILES, ids=["2", "1"])
def test_a_control_group_is_a_limit_and_its_idle_files_are_none(monkeypatch, tmp_path, version):
    monkeypatch.setattr(memory, "CGROUP_ROOT", tmp_path)
    system = memory.get_free_bytes(CPU)
    group(tmp_path, *version, 1000, 600, 100)
    assert memory.get_free_bytes(CPU) == 500
    group(tmp_path, *version, 1000, 1600, 100)
    assert memory.get_free_bytes(CPU) == 0
    group(tmp_path, *version, "max", 600, 100)
    assert memory.get_free_bytes(CPU) == pytest.approx(system, rel=0.5)


def test_headroom(monkeypatch):
    monkeypatch.setattr(memory, "get_free_bytes", lambda device: 11 * 10**9)
    memory.require_memory("model", 10 * 10**9, CPU)
    with pytest.raises(RefusedError, match="model needs 11.4 GB .*give a smaller model or dtype="):
        memory.require_memory("model", 104 * 10**8, CPU)
    monkeypatch.setattr(memory, "get_free_bytes", lambda device: None)  # unknown
    memory.require_memory("model", 10**15, CPU)
