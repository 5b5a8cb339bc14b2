"""Training: a run that was killed ends where one that was not does."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import LlamaConfig

import foretoken
from foretoken.errors import InputError
from foretoken.train.recipe import TrainingRecipe
from reproduction.train import train_lm
from tiny import TEXT

SHAPE = {
    "num_hidden_layers": 1,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 280,
    "max_position_embeddings": 16,
    "tie_word_embeddings": True,
}
RECIPE = TrainingRecipe(steps=9, batch=2, warmup=2, save_every=2)


class Killed(BaseException):
    pass


@pytest.fixture
def text(tmp_path: Path) -> Path:
    for i in range(3):
        (tmp_path / "text").mkdir(exist_ok=True)
        (tmp_path / "text" / f"{i}.txt").write_text(TEXT * 9, encoding="utf-8")
    return tmp_path / "text"


def train(text: Path, out: Path, *, kill_at: int | None = None, **options):
    steps: list[int] = []

    def report(step: int, loss: float, held_out: float | None) -> None:
        steps.append(step)
        assert loss > 0 and (held_out is None) == bool(step % 2 and step != 9)
        if step == kill_at:
            raise Killed

    arguments = {"tokenizer_folder": None, "init": None} | options
    return train_lm(text, out, LlamaConfig(**SHAPE), RECIPE, report=report, **arguments), steps


def test_killed_and_resumed_is_uninterrupted(text, tmp_path):
    whole, steps = train(text, tmp_path / "whole")
    assert steps == list(range(1, 10))
    for kill_at in (1, 5):  # before the first checkpoint, and between two
        with pytest.raises(Killed):
            train(text, tmp_path / "killed", kill_at=kill_at)
    rest, steps = train(text, tmp_path / "killed")
    assert steps == [5, 6, 7, 8, 9]
    weights = [
        load_file(tmp_path / name / "model" / "model.safetensors") for name in ("whole", "killed")
    ]
    assert weights[0].keys() == weights[1].keys()
    for name, weight in weights[0].items():
        assert weight.dtype == torch.bfloat16 and torch.equal(weight, weights[1][name])
    assert rest["held_out_nats_per_token"] == whole["held_out_nats_per_token"]
    assert rest["steps"] == whole["steps"] == 9 and rest["parameters"] == whole["parameters"]


def test_what_is_left_behind(text, tmp_path):
    summary, _ = train(text, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    with (tmp_path / "run" / "log.csv").open(newline="") as lines:
        log = list(csv.DictReader(lines))
    assert [int(line["step"]) for line in log] == [2, 4, 6, 8, 9]
    assert float(log[-1]["held_out"]) < float(log[0]["held_out"])
    assert {path.name for path in (tmp_path / "run").iterdir()} == {
        "checkpoint.pt", "log.csv", "model", "summary.json", "tokenizer"
    }  # fmt: skip
    spec = foretoken.load(tmp_path / "run" / "model", "lookup")
    (completion,) = spec.generate("It was", max_new_tokens=5)
    assert len(completion.tokens) == 5 and spec.target.context == 16 and spec.ends.eos == {0}


def test_a_draft_shares_the_tokenizer_and_starts_from_weights(text, tmp_path):
    train(text, tmp_path / "target")
    model = tmp_path / "target" / "model"
    train(text, tmp_path / "draft", tokenizer_folder=model)
    assert not (tmp_path / "draft" / "tokenizer").exists()
    spec = foretoken.load(model, tmp_path / "draft" / "model")
    assert spec.generate("It was", max_new_tokens=5, gamma=2)[0].stats.drafted
    with pytest.raises(Killed):
        train(text, tmp_path / "more", init=model, kill_at=1)


def test_a_broken_checkpoint_is_said(text, tmp_path):
    with pytest.raises(Killed):
        train(text, tmp_path / "run", kill_at=5)
    (tmp_path / "run" / "checkpoint.pt").write_bytes(b"broken")
    with pytest.raises(InputError, match="is not a checkpoint of this model"):
        train(text, tmp_path / "run")
