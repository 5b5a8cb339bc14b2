"""An encoder-decoder from pairs: it learns, resumes, stops when nothing gets better, and runs."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from transformers import T5Config

import foretoken
from foretoken.errors import InputError
from foretoken.train import corpus
from foretoken.train.corpus import Example
from foretoken.train.recipe import TrainingRecipe
from reproduction.new_tokenizer import read_tokenizer
from reproduction.train import (
    GRAIN,
    Batches,
    cross_entropy,
    pairs_loss,
    train_seq2seq,
)
from tiny import byte_level, folder, llama, t5

SHAPE = {
    "num_layers": 1,
    "num_decoder_layers": 1,
    "d_model": 16,
    "d_kv": 8,
    "d_ff": 24,
    "num_heads": 2,
    "vocab_size": 300,
    "feed_forward_proj": "gated-gelu",
}
LESSON = {"length": 12, "dropout": 0.0}
RECIPE = TrainingRecipe(steps=6, batch=120, warmup=1, save_every=2, learning_rate=0.01)
WORDS = ["sea", "old man", "house", "day", "cold year", "whale"]


class Killed(BaseException):
    pass


@pytest.fixture
def pairs(tmp_path: Path) -> Path:
    """A source is answered by its own words, in capitals."""
    rows = [f"the {a} and the {b}" for a in WORDS for b in WORDS]
    path = tmp_path / "pairs.tsv"
    path.write_text("\n".join(f"{row}\t{row.upper()}" for row in rows), encoding="utf-8")
    return path


def train(data, out, lesson=LESSON, recipe=RECIPE, *, kill_at=None, **given):
    losses: list[float] = []

    def report(step: int, loss: float, held_out: float | None) -> None:
        losses.append(loss)
        assert (held_out is None) == bool(step % recipe.save_every and step != recipe.steps)
        if step == kill_at:
            raise Killed

    config = T5Config(**SHAPE, dropout_rate=lesson["dropout"])
    options = {"tokenizer_folder": None, "init": None} | given
    summary = train_seq2seq(data, out, config, recipe, lesson["length"], report=report, **options)
    return summary, losses


def weights(out: Path) -> dict[str, torch.Tensor]:
    return load_file(out / "model" / "model.safetensors")


@pytest.mark.parametrize(("dropout", "bfloat16"), [(0.2, False), (0.0, True)])
def test_killed_and_resumed_is_uninterrupted(pairs, tmp_path, dropout, bfloat16):
    lesson, recipe = LESSON | {"dropout": dropout}, replace(RECIPE, bfloat16=bfloat16)
    whole, _ = train(pairs, tmp_path / "whole", lesson, recipe)
    for kill_at in (1, 3):  # before the first checkpoint, and between two
        with pytest.raises(Killed):
            train(pairs, tmp_path / "cut", lesson, recipe, kill_at=kill_at)
    rest, losses = train(pairs, tmp_path / "cut", lesson, recipe)
    assert len(losses) == 4 and {**rest, "seconds": 0} == {**whole, "seconds": 0}
    a, b = weights(tmp_path / "whole"), weights(tmp_path / "cut")
    assert a.keys() == b.keys() and all(torch.equal(w, b[name]) for name, w in a.items())
    assert all(w.dtype == torch.bfloat16 for w in a.values())
    with pytest.raises(InputError, match="began with length 12, not 9"):
        train(pairs, tmp_path / "cut", lesson | {"length": 9}, recipe)


def test_what_is_left_behind_runs_with_a_draft(pairs, tmp_path):
    summary, _ = train(pairs, tmp_path / "run")
    assert json.loads((tmp_path / "run" / "summary.json").read_text()) == summary
    with (tmp_path / "run" / "log.csv").open(newline="") as lines:
        log = list(csv.DictReader(lines))
    assert [int(line["step"]) for line in log] == [2, 4, 6]
    assert float(log[-1]["held_out"]) < float(log[0]["held_out"])
    target = tmp_path / "run" / "model"
    train(pairs, tmp_path / "draft", recipe=replace(RECIPE, seed=1), tokenizer_folder=target)
    assert not (tmp_path / "draft" / "tokenizer").exists()
    spec = foretoken.load(target, tmp_path / "draft" / "model")
    drafted, plain = (
        spec.generate("the sea and the day", gamma=gamma, max_new_tokens=6)[0] for gamma in (2, 0)
    )
    assert drafted.tokens == plain.tokens and drafted.stats.drafted
    more, _ = train(pairs, tmp_path / "more", init=target, recipe=replace(RECIPE, steps=2))
    assert more["held_out_nats_per_token"] < float(log[0]["held_out"])


def test_a_run_ends_when_nothing_gets_better_and_keeps_the_best(pairs, tmp_path):
    recipe = replace(RECIPE, steps=40, save_every=1, patience=2, learning_rate=1.0)
    summary, losses = train(pairs, tmp_path, recipe=recipe)
    assert summary["steps"] == len(losses) == summary["best_step"] + 2 < 40
    again, more = train(pairs, tmp_path, recipe=recipe)
    assert not more and again["best_step"] == summary["best_step"]


def test_the_loss_is_that_of_every_pair_alone():
    model = t5(64).double().requires_grad_(False)
    random = np.random.default_rng(0)
    lessons = [
        Example(random.integers(2, 64, n).tolist(), random.integers(2, 64, 9 - n).tolist())
        for n in range(1, 9)
    ]
    expected = 0.0
    for pair in lessons:
        ids = torch.tensor([[1, *pair.reference[:-1]]])
        logits = model(input_ids=torch.tensor([pair.prompt]), decoder_input_ids=ids).logits[0]
        distribution = logits.log_softmax(-1)
        expected -= float(distribution[range(len(pair.reference)), pair.reference].sum())
    assert float(cross_entropy(model, lessons, "sum")) == pytest.approx(expected)
    tokens = sum(len(pair.reference) for pair in lessons)
    assert float(cross_entropy(model, lessons, "mean")) == pytest.approx(expected / tokens)
    assert pairs_loss(model, lessons, 50) == pytest.approx(expected / tokens)


def test_a_batch_holds_pairs_of_like_lengths_and_an_epoch_all_pairs():
    random = np.random.default_rng(0)
    lessons = [Example([i] * int(m), [i] * int(n)) for i, (m, n) in
             enumerate(random.integers(1, 40, (50, 2)))]  # fmt: skip
    dealt = Batches(lessons, 200, seed=3)
    count = len(dealt.edges) - 1
    epochs = [[dealt.at(epoch * count + k) for k in range(count)] for epoch in range(2)]
    for batches in epochs:
        assert sorted(pair.prompt[0] for batch in batches for pair in batch) == list(range(50))
        for batch in batches:
            widths = [max(len(p.prompt) for p in batch), max(len(p.reference) for p in batch)]
            assert len(batch) == 1 or len(batch) * sum(widths) <= 200
            lengths = [-(-len(p.reference) // GRAIN) for p in batch]
            assert max(lengths) - min(lengths) <= 1
    assert epochs[0] != epochs[1]
    assert Batches(lessons, 200, seed=3).at(count + 1) == epochs[1][1]  # whatever was asked before
    assert Batches(lessons, 1, seed=3).at(0)  # a pair beyond the budget is alone


def test_what_cannot_be_learnt_is_said(pairs, tmp_path):
    bad = tmp_path / "bad.jsonl"
    bad.write_text('{"source": "a", "target": "b"}\n{"source": "a"}\n')
    with pytest.raises(InputError, match="bad.jsonl, line 2: there is no target"):
        train(bad, tmp_path / "run")
    words = folder(tmp_path / "lm", llama(), byte_level())
    with pytest.raises(InputError, match="has no padding or puts no end behind a text"):
        train(pairs, tmp_path / "run", tokenizer_folder=words)
    with pytest.raises(InputError, match="lm is a llama model"):
        train(pairs, tmp_path / "run", tokenizer_folder=_tokenizer(pairs, tmp_path), init=words)
    small = folder(tmp_path / "small", t5(64))
    with pytest.raises(InputError, match="has 64 rows for 300 tokens"):
        train(pairs, tmp_path / "run", tokenizer_folder=_tokenizer(pairs, tmp_path), init=small)
    with pytest.raises(InputError, match="length is 0"):
        train(pairs, tmp_path / "run", LESSON | {"length": 0})


def _tokenizer(pairs: Path, tmp_path: Path) -> Path:
    """That of a run that was begun."""
    if not (tmp_path / "begun").exists():
        with pytest.raises(Killed):
            train(pairs, tmp_path / "begun", kill_at=1)
    return tmp_path / "begun" / "tokenizer"


def test_targets_are_cut_and_end_with_the_end_of_text(pairs, tmp_path):
    tokenizer = read_tokenizer(_tokenizer(pairs, tmp_path))
    parsed = corpus.read_examples(pairs, tokenizer, 12, encoder_decoder=True)
    everyone = [*parsed.train, *parsed.held_out]
    assert all(pair.prompt[-1] == tokenizer.eos_token_id for pair in everyone)
    ends = {pair.reference[-1] == tokenizer.eos_token_id for pair in everyone}
    assert ends == {True, False} and max(len(pair.reference) for pair in everyone) == 12
    assert (
        tokenizer.decode(tokenizer("naïve 日本").input_ids, skip_special_tokens=True)
        == "naïve 日本"
    )
