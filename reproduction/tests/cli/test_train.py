"""`python -m reproduction train lm` as a user meets it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import typer

from console import mistake
from reproduction.cli import app
from tiny import TEXT, byte_level, folder, llama

TINY = ("--layers", 1, "--hidden", 16, "--feed-forward", 24, "--heads", 2, "--kv-heads", 1)
TINY = (*TINY, "--vocab-size", 280, "--batch", 2, "--context", 16)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder `target`, one without a tokenizer, and a text."""
    base = tmp_path_factory.mktemp("train")
    folder(base / "target", llama(320), byte_level())
    folder(base / "bare", llama(64))
    (base / "text").mkdir()
    (base / "text" / "book.txt").write_text(TEXT * 40, encoding="utf-8")
    return base


@pytest.mark.parametrize("name", [*typer.main.get_command(app).commands["train"].commands])
def test_every_option_has_words(name):
    """And a paragraph of the help is one line, which the terminal breaks."""
    command = typer.main.get_command(app).commands["train"].commands[name]
    assert [each.name for each in command.params if not each.help] == []
    assert all("\n" not in part for part in command.help.strip().split("\n\n"))


def test_a_model_is_trained_and_used(console, product, base, tmp_path):
    args = ("--data", base / "text", "--out", tmp_path / "run", "--steps", 3, *TINY)
    result = console("train", "lm", *args, "--json")
    assert result.code == 0
    summary = json.loads(result.out)
    assert summary["steps"] == 3 and summary["held_out_bits_per_byte"] > 0
    assert "step 3: loss" in result.err
    used = product(
        "generate", "It was", "--target", tmp_path / "run" / "model", "--draft", "lookup"
    )
    assert used.code == 0 and used.out
    again = console("train", "lm", *args, "--json")  # nothing is left to do
    assert json.loads(again.out)["held_out_nats_per_token"] == summary["held_out_nats_per_token"]
    grown = console("train", "lm", *args, "--layers", 2)
    mistake(grown, "checkpoint.pt is not a checkpoint of this model (RuntimeError)")
    from_it = ("--out", tmp_path / "more", "--init", tmp_path / "run" / "model", "--steps", 1)
    shown = console("train", "lm", "--data", base / "text", *from_it, *TINY)
    assert shown.code == 0 and f"{tmp_path / 'more' / 'model'}: " in shown.out
    assert "held out: 5." in shown.out
    assert f"use it: foretoken generate --target {tmp_path / 'more' / 'model'} PROMPT" in shown.out


def test_bad_training_input(console, base, tmp_path):
    out, target, text = tmp_path / "out", base / "target", base / "text"
    lm = ("train", "lm", "--out", out)
    mistake(console(*lm, "--data", tmp_path / "no"), "no; give a text file, or a folder of text")
    (tmp_path / "short").mkdir()
    (tmp_path / "short" / "a.txt").write_text("Too short.")
    mistake(console(*lm, "--data", target), "no .txt or .txt.gz file in")
    mistake(console(*lm, "--data", text, "--tokenizer", "no"), "no is no folder")
    mistake(console(*lm, "--data", text, "--init", "no"), "no is no folder")
    mistake(console(*lm, "--data", text, "--heads", 5), "hidden is 192")
    mistake(console(*lm, "--data", text, "--steps", 0), "steps is 0")
    assert not out.exists()
    lm = (*lm, "--context", 16)
    flags = ("--tokenizer", target, "--init")
    mistake(console(*lm, "--data", text, *flags, text), "holds no config.json")
    mistake(console(*lm, "--data", text, *flags, base / "bare"), "has 64 rows for 320 tokens")
    mistake(
        console(*lm, "--data", text, "--tokenizer", text), "holds no tokenizer that can be read"
    )
    mistake(console(*lm, "--data", tmp_path / "short", "--tokenizer", target), "give more text")
