"""`foretoken doctor`: the machine, and the backend and precision of one model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from console import Run, mistake
from foretoken.loading import runtimes
from foretoken.loading.fastest import Fastest
from foretoken.measurement import machine
from foretoken.models.onnx.products import rounded
from tiny import byte_level, folder, llama


def test_versions_the_processor_memory_and_devices(
    console: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machine, "READ_BYTES", 2**20)
    document: dict[str, Any] = json.loads(console("doctor", "--json").out)
    assert document["versions"].keys() >= {"python", "torch", "transformers", "foretoken"}
    assert document["devices"][0]["name"] == "cpu" and document["devices"][0]["free_bytes"] > 0
    processor = document["processor"]
    assert processor["name"] and processor["threads"] >= 1 and processor["bytes_per_second"] > 0
    shown = console("doctor").out
    assert f"processor: {processor['name']}, {processor['threads']} threads" in shown
    assert " GB/s, reading 1 MiB" in shown and "foretoken doctor MODEL" in shown
    assert all(name in shown for name in processor["abilities"] or ())
    for runtime in ("ONNX Runtime", "OpenVINO"):
        assert f"\n{runtime}: " in shown


def test_options_without_a_model_to_load(console: Run) -> None:
    mistake(console("doctor", "--dtype", "int8"), "name one: foretoken doctor MODEL")
    mistake(console("doctor", "--rows", 4), "name one: foretoken doctor MODEL")


def test_a_runtime_that_was_asked_for(console: Run, tmp_path: Path) -> None:
    model = folder(tmp_path / "m", llama(320), byte_level())
    result = console("doctor", model, "--runtime", "transformers", "--json")
    assert json.loads(result.out)["why"].startswith("it was asked for")
    mistake(console("doctor", model, "--dtype", "int5"), "int5")


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose products are large enough to be rounded."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    folder(tmp_path / "m", llama(320, **wide), byte_level())
    return tmp_path


@pytest.mark.onnx
@pytest.mark.openvino
@pytest.mark.parametrize(
    ("ratio", "advice"), [(0.8, ""), (1.25, ": int8 is the better choice here")]
)
def test_four_bits_are_compared_with_eight(
    console: Run, base: Path, monkeypatch: pytest.MonkeyPatch, ratio: float, advice: str
) -> None:
    def measured(network: object, dtype: str, *args: object, **options: object) -> Fastest:
        return Fastest("onnx", True, ratio if dtype == "int4" else 1.0)

    monkeypatch.setattr(runtimes, "fastest", measured)
    shown = console("doctor", base / "m", "--dtype", "int4").out
    assert f"int4 takes {ratio:.2f} of the time of int8, over some layers{advice}" in shown
    document = json.loads(console("doctor", base / "m", "--dtype", "int4", "--json").out)
    assert (document["dtype"], document["time_over_int8"]) == ("int4", ratio)
    assert "of the time" not in console("doctor", base / "m", "--dtype", "int8").out


@pytest.mark.onnx
@pytest.mark.openvino
def test_weights_of_four_bits_stay_so(
    console: Run, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = llama(320, hidden_size=128, intermediate_size=128, num_hidden_layers=1)
    for part in network.model.layers.modules():
        if isinstance(part, nn.Linear):
            blocks = rounded(part.weight.detach().numpy(), 4)
            part.weight.data = torch.tensor(blocks.integers * blocks.scales).view_as(part.weight)
    folder(base / "blocks", network, byte_level())
    monkeypatch.setattr(runtimes, "fastest", lambda *args, **options: Fastest("onnx", True, 1.0))
    said = "its weights have four bits already, which int8 keeps: the same as in int4\n"
    for name, same in (("blocks", True), ("m", False)):
        assert (said in console("doctor", base / name, "--dtype", "int8").out) == same
    target = ("--target", base / "blocks", "--dtype", "int8")
    for draft in ("self:int4", "self:int8"):
        says = f"draft is '{draft}', but the target's weights are in int4 too; give"
        refused = console("generate", "a", *target, "--draft", draft)
        assert refused.code == 2 and says in refused.err
