"""`foretoken doctor`: the machine, and the backend and precision of one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from console import Run, mistake
from foretoken.kernels import library
from foretoken.measurement import machine
from foretoken.models.native.packing import round_blocks
from tiny import byte_level, folder, llama


def test_versions_the_processor_memory_and_devices(
    console: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "BANDWIDTH_READ_BYTES", 2**20)
    document: dict[str, Any] = json.loads(console("doctor", "--json").out)
    assert document["versions"].keys() >= {"python", "torch", "transformers", "foretoken"}
    assert document["devices"][0]["name"] == "cpu" and document["devices"][0]["free_bytes"] > 0
    processor = document["processor"]
    assert processor["name"] and processor["threads"] >= 1 and processor["bytes_per_second"] > 0
    shown = console("doctor").out
    assert f"processor: {processor['name']}, {processor['threads']} threads" in shown
    assert " GB/s when reading 1 MiB" in shown and "foretoken doctor MODEL" in shown
    assert all(name in shown for name in processor["abilities"] or ())
    assert "\nnative decoder: " in shown


def test_a_runtime_that_was_asked_for(console: Run, tmp_path: Path) -> None:
    model = folder(tmp_path / "m", llama(320), byte_level())
    result = console("doctor", model, "--runtime", "transformers", "--json")
    assert json.loads(result.out)["why"].startswith("it was requested")


@pytest.mark.native
def test_on_the_native_decoder(console: Run, base: Path) -> None:
    document = json.loads(console("doctor", base / "m", "--json").out)
    assert (document["runtime"], document["exact"]) == ("native", "bitwise")
    shown = console("doctor", base / "m").out
    assert "m runs on native: it passed the self-check\n" in shown
    assert "greedy output is identical with and without draft tokens, in any batch" in shown


@pytest.mark.native
def test_kernels_that_were_not_compiled(
    console: Run, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine's line says what to do, a model's why it runs elsewhere."""
    monkeypatch.setattr(machine, "BANDWIDTH_READ_BYTES", 2**20)
    monkeypatch.setattr(library, "LIBRARY_FILE", base / "kernels.so")
    library.load_library.cache_clear()
    said = "the native decoder was not compiled: install g++"
    assert f"\nnative decoder: {said}" in console("doctor").out
    assert f"m runs on transformers: {said}" in console("doctor", base / "m").out
    asked = console("doctor", base / "m", "--runtime", "native")
    mistake(asked, "leave runtime at 'auto' (not 'native')")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose products are large enough to be rounded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    folder(tmp_path / "m", llama(320, **wide), byte_level())
    return tmp_path


@pytest.mark.native
def test_weights_of_four_bits_stay_so(console: Run, base: Path) -> None:
    network = llama(320, hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    for part in network.model.layers.modules():
        if isinstance(part, nn.Linear):
            blocks = round_blocks(part.weight.detach().numpy(), 4)
            part.weight.data = torch.tensor(blocks.integers * blocks.scales).view_as(part.weight)
    folder(base / "blocks", network, byte_level())
    said = "its weights have four bits already, so int8 is the same as int4 for this model\n"
    for name, same in (("blocks", True), ("m", False)):
        assert (said in console("doctor", base / name, "--dtype", "int8").out) == same
    target = ("--target", base / "blocks", "--dtype", "int8")
    for draft in ("self:int4", "self:int8"):
        says = f"draft is '{draft}', but the target's weights are in int4 too; give"
        refused = console("generate", "a", *target, "--draft", draft)
        assert refused.code == 2 and says in refused.err
