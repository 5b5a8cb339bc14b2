"""`foretoken doctor --held-out`: how rounding changes a model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from console import Run, mistake
from foretoken.lab import rounding
from foretoken.loading import runtimes
from foretoken.loading.fastest import Fastest
from foretoken.models.onnx.products import rounded
from tiny import TEXT, byte_level, folder, llama


@pytest.fixture
def base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A model whose products are large enough to be rounded, one without a tokenizer, a text."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(rounding, "LETTERS", 60)
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1}
    folder(tmp_path / "m", llama(320, **wide), byte_level())
    folder(tmp_path / "bare", llama(320, **wide))
    (tmp_path / "text.txt").write_text(TEXT * 20)
    return tmp_path


@pytest.mark.openvino
def test_figures_of_a_rounded_model(console: Run, base: Path) -> None:
    args = ("doctor", base / "m", "--dtype", "int8", "--held-out", base / "text.txt")
    result = console(*args)
    assert result.code == 0
    for phrase in ("m in int8, on ", "text.txt (sha256 ", "bits per byte ", "sum min(p, q)"):
        assert phrase in result.out
    document = json.loads(console(*args, "--json").out)
    assert document["dtype"] == "int8" and document["tokens"] > 100
    assert 0.5 < document["overlap"]["value"] < 1 and document["same"]["value"] <= 1
    more = document["rounded_bits_per_byte"]["value"] - document["bits_per_byte"]["value"]
    assert more == pytest.approx(document["more_bits_per_byte"]["value"])
    kept = json.loads(console("doctor", "--cache", "--json").out)["models"]
    cards = {row["dtype"]: row["card"] for row in kept}
    assert document["kept"] and cards["float32"] is None
    assert cards["int8"] == {name: document[name] for name in cards["int8"]}
    listed = console("doctor", "--cache").out
    assert f"    on text.txt, {document['date']}: " in listed and "sum min(p, q) " in listed
    assert console(*args[:4]).code == 0  # the conversion is found, as it was
    assert len(json.loads(console("doctor", "--cache", "--json").out)["models"]) == 2
    other = console("doctor", "no-model", "--clear-cache")
    mistake(other, "no conversion of 'no-model' is kept; --cache lists their names")
    assert console("doctor", kept[0]["name"], "--clear-cache").code == 0
    assert json.loads(console("doctor", "--cache", "--json").out)["models"] == []


@pytest.mark.openvino
def test_a_model_without_a_tokenizer_is_refused(console: Run, base: Path) -> None:
    args = ("--dtype", "int8", "--held-out", base / "text.txt")
    result = console("doctor", base / "bare", *args)
    assert result.code == 2 and result.out == ""  # a conversion is told before
    assert "error: " in result.err and "bare has no tokenizer, so no bits per byte" in result.err


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


def test_mistakes(console: Run, base: Path) -> None:
    text = ("--held-out", base / "text.txt")
    mistake(console("doctor", *text), "--dtype is float32, which rounds no weights; give int8 or")
    mistake(console("doctor", *text, "--dtype", "int5"), "int5")
    mistake(console("doctor", "--dtype", "int8", "--held-out", "no.txt"), "no.txt cannot be read")
    mistake(console("doctor", *text, "--cache"), "give one of --cache, --clear-cache, --families")
