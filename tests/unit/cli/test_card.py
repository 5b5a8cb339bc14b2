"""`foretoken doctor --held-out`: the card of a rounded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console import Run, mistake
from foretoken.cli.card import markdown
from foretoken.lab import rounding
from foretoken.lab.estimate import Estimate
from foretoken.lab.rounding import Rounding
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
def test_a_card_is_made(console: Run, base: Path) -> None:
    args = ("doctor", base / "m", "--dtype", "int8", "--held-out", base / "text.txt")
    result = console(*args)
    assert result.code == 0 and result.out.startswith(f"# {base / 'm'} in int8\n")
    for phrase in ("text.txt (sha256 ", "| bits per byte | ", "sum min(p, q)", "--dtype int8"):
        assert phrase in result.out
    assert {row["dtype"] for row in _cache(console)} == {"float32", "int8"}
    document = json.loads(console(*args, "--json").out)
    assert document["dtype"] == "int8" and document["tokens"] > 100
    assert 0.5 < document["overlap"]["value"] < 1 and document["same"]["value"] <= 1
    more = document["rounded_bits_per_byte"]["value"] - document["bits_per_byte"]["value"]
    assert more == pytest.approx(document["more_bits_per_byte"]["value"])
    assert console("doctor", "--clear-cache").code == 0 and _cache(console) == []


def _cache(console: Run) -> list[dict[str, str]]:
    return json.loads(console("doctor", "--cache", "--json").out)["models"]


@pytest.mark.openvino
def test_a_model_without_a_tokenizer_is_refused(console: Run, base: Path) -> None:
    args = ("--dtype", "int8", "--held-out", base / "text.txt")
    result = console("doctor", base / "bare", *args)
    assert result.code == 2 and result.out == ""  # a conversion is told before
    assert "error: " in result.err and "bare has no tokenizer, so no bits per byte" in result.err


def test_mistakes(console: Run, base: Path) -> None:
    text = ("--held-out", base / "text.txt")
    mistake(console("doctor", *text), "--dtype is float32, which rounds no weights; give int8 or")
    mistake(console("doctor", *text, "--dtype", "int5"), "int5")
    mistake(console("doctor", "--dtype", "int8", "--held-out", "no.txt"), "no.txt cannot be read")
    mistake(console("doctor", *text, "--cache"), "give one of --cache, --clear-cache, --speed and")


def test_what_a_card_says() -> None:
    loss = Rounding(
        tokens=900,
        bytes=3000,
        bits_per_byte=Estimate(1.5, 1.4, 1.6),
        rounded_bits_per_byte=Estimate(1.51, 1.4, 1.6),
        more_bits_per_byte=Estimate(0.01, 0.008, 0.012),
        same=Estimate(0.93, 0.92, 0.94),
        overlap=Estimate(0.95, 0.94, 0.96),
    )
    lines = markdown("m", "int4", loss, "a.txt", "foretoken doctor m").splitlines()
    assert lines[0] == "# m in int4" and lines[2].startswith("Measured on 900 tokens of a.txt, 20")
    assert "| bits per byte | 1.500 | 1.510 (+0.0100 ± 0.0020) |" in lines
    assert "| likeliest token is float32's | | 93.0% ± 1.0% |" in lines
    assert "| sum min(p, q) at temperature 1 | | 0.9500 ± 0.0100 |" in lines
    assert lines[-1] == "Made by `foretoken doctor m`."
