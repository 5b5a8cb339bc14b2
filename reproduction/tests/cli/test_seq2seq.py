"""`python -m reproduction train seq2seq` as a user meets it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from console import Run, mistake
from reproduction import train as seq2seq

TINY = ("--encoder-layers", 1, "--decoder-layers", 1, "--hidden", 16, "--feed-forward", 24)
TINY = (*TINY, "--heads", 2, "--vocab-size", 280, "--batch", 200, "--steps", 2)


@pytest.fixture
def run(console: Run) -> Run:
    return partial(console, "train", "seq2seq")


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    path = tmp_path / "pairs.jsonl"
    rows = [{"source": f"the day {i}", "target": f"der Tag {i}"} for i in range(32)]
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


def test_a_model_is_trained_and_used_and_a_draft_for_it(run, console, product, pairs, tmp_path):
    args = ("--data", pairs, "--out", tmp_path / "run", *TINY)
    summary = json.loads(run(*args, "--json").out)
    assert summary["steps"] == 2 and summary["held_out_nats_per_token"] > 0
    model, draft = tmp_path / "run" / "model", tmp_path / "draft" / "model"
    shown = run(*args)  # nothing is left to do
    assert shown.out.startswith(f"{model}: {summary['parameters']} parameters, 2 steps in ")
    nats = f"held out: {summary['held_out_nats_per_token']:.4f} nats a token at step 2\n"
    assert nats in shown.out
    assert shown.out.endswith(f"\nuse it: foretoken generate --target {model} PROMPT\n")
    further = ("--data", pairs, "--out", tmp_path / "draft", *TINY, "--tokenizer", model)
    result = run(*further)
    assert "step 2: loss " in result.err
    assert result.out.endswith(f"generate --target {model} --draft {draft} PROMPT\n")
    used = product("generate", "the day 3", "--target", model, "--draft", draft, "--gamma", 2)
    assert used.code == 0
    table = tmp_path / "table.safetensors"
    counted = ("--data", pairs, "--tokenizer", model, "--order", 2, "--out", table)
    document = json.loads(console("train", "ngram", *counted, "--json").out)
    assert document["order"] == 2 and document["bytes"] == table.stat().st_size
    options = ("--target", model, "--draft", f"reproduction.ngram:{table}", "--gamma", 2)
    assert product("generate", "the day 3", *options).out == used.out


def test_mistakes(run, pairs, tmp_path):
    args = ("--out", tmp_path / "run", *TINY)
    mistake(run("--data", tmp_path / "no", *args), "there is no")
    mistake(run("--data", pairs, *args, "--init", "no"), "no is no folder")
    mistake(run("--data", pairs, *args, "--tokenizer", "no"), "give a folder of a tokenizer")
    mistake(run("--data", pairs, *args, "--patience", -1), "patience is -1")
    (tmp_path / "bad.tsv").write_text("a\tb\nc\n")
    mistake(run("--data", tmp_path / "bad.tsv", *args), "line 2: 1 columns")
    assert not (tmp_path / "run").exists()


def test_an_interrupted_run_says_how_to_go_on(run, pairs, tmp_path, monkeypatch):
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(seq2seq, "train_seq2seq", interrupted)
    result = run("--data", pairs, "--out", tmp_path / "run")
    message = f"interrupted; the same command goes on from {tmp_path / 'run'}\n"
    assert (result.code, result.out, result.err) == (130, "", message)
