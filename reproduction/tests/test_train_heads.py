"""Heads learn, from books or from an encoder-decoder's own answers; a run that was killed ends
where one that was not does. (The loop's own tests say what a full disk leaves.)"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from typer.testing import CliRunner

import tiny
from foretoken import load
from foretoken.errors import InputError
from foretoken.train.recipe import TrainingRecipe
from reproduction import cli
from reproduction.blockwise import Heads
from reproduction.train_heads import Teacher, distributions, measure, train_heads

RECIPE = TrainingRecipe(steps=9, batch=2, learning_rate=0.01, warmup=2, save_every=2)


class Killed(BaseException):
    pass


@pytest.fixture
def text(tmp_path: Path) -> Path:
    (tmp_path / "text.txt").write_text(tiny.TEXT * 9, encoding="utf-8")
    return tmp_path / "text.txt"


def teacher(text: Path, network=None, length: int = 8, share: float = 0.0) -> Teacher:
    return Teacher.of(network or tiny.llama(), tiny.byte_level(), text, length, share)


def train(text: Path, out: Path, *, kill_at: int | None = None, count: int = 3, **of):
    steps: list[int] = []

    def report(step: int, loss: float, found: list[float] | None) -> None:
        steps.append(step)
        assert loss > 0 and (found is None) == bool(step % 2 and step != 9)
        if step == kill_at:
            raise Killed

    return train_heads(teacher(text, **of), out, count, RECIPE, report), steps


def test_killed_and_resumed_is_uninterrupted(text, tmp_path):
    whole, steps = train(text, tmp_path / "whole", share=0.5)
    assert steps == list(range(1, 10))
    for kill_at in (1, 5):  # before the first checkpoint, and between two
        with pytest.raises(Killed):
            train(text, tmp_path / "killed", share=0.5, kill_at=kill_at)
    assert not (tmp_path / "killed").exists() and (tmp_path / "killed.run").is_dir()
    rest, steps = train(text, tmp_path / "killed", share=0.5)
    assert steps == [5, 6, 7, 8, 9]
    weights = [load_file(tmp_path / name) for name in ("whole", "killed")]
    assert weights[0].keys() == weights[1].keys() == {"inner", "outer", "sketch"}
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert {**rest, "seconds": 0} == {**whole, "seconds": 0}


def test_what_cannot_be_trained_is_said(text, tmp_path):
    with pytest.raises(InputError, match="heads is 0"):
        train(text, tmp_path / "run", count=0)
    with pytest.raises(InputError, match="length is 0"):
        train(text, tmp_path / "run", length=0)
    with pytest.raises(InputError, match="target_generated is 2"):
        train(text, tmp_path / "run", share=2)


def test_texts_too_short_for_the_last_head_teach_the_others(tmp_path):
    """Batches, and held-out texts, of which none is long enough for heads 2 to 4."""
    rows = [{"source": "It was the day", "target": "a"} for _ in range(17)]
    rows[5]["target"] = "the old man"
    data = tmp_path / "short.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    source = teacher(data, tiny.t5(), 6)
    assert min(len(e.reference) for e in source.texts.train) == 1
    summary = train_heads(source, tmp_path / "heads", 4, RECIPE, lambda *said: None)
    assert len(summary["alpha"]) == 4 and summary["alpha"][0] > 0
    assert Heads.load(tmp_path / "heads").count == 4


def test_heads_that_no_text_could_teach_are_refused(text, tmp_path):
    short = tmp_path / "short.jsonl"
    short.write_text('{"source": "It was the day", "target": "a"}\n' * 17)
    asked = "heads is {}, but with length 6 the texts teach {} at most; give"
    for data, target, count, reach, share in (
        (text, tiny.llama(), 30, 21, 0.0),  # a window is 16 + 6 tokens
        (short, tiny.t5(), 2, 1, 0.0),
        (short, tiny.t5(), 7, 6, 0.5),  # the target may write more
    ):
        arguments = {"network": target, "length": 6, "share": share}
        with pytest.raises(InputError, match=asked.format(count, reach)):
            train(data, tmp_path / "heads", count=count, **arguments)
        assert not (tmp_path / "heads.run").exists()
    train(short, tmp_path / "heads", count=6, network=tiny.t5(), length=6, share=0.5)


def test_an_out_in_the_way_of_another_is_refused_first(text, tmp_path):
    train(text, tmp_path / "h")
    with pytest.raises(InputError, match="h.run is a folder"):
        train(text, tmp_path / "h.run")
    (tmp_path / "i.run").touch()
    with pytest.raises(InputError, match="i.run is a file"):
        train(text, tmp_path / "i")


def test_each_head_is_taught_the_distribution_of_its_own_place(text):
    """Untrained heads repeat the target's distribution of the place that they read."""
    source = teacher(text)
    texts = source.authors.make_batch(source.texts.train, 2, 0, 0)
    row = [*texts[0].request.prompt, *texts[0].new_tokens]
    with torch.no_grad():
        stock = source.network(torch.tensor([row])).logits[0]
    for k, (taught, own) in enumerate(
        distributions(Heads.fresh(source.network, 3), source.network, texts), 1
    ):
        n = len(row) - k
        assert torch.allclose(taught[:n], stock[k:], atol=1e-4)
        assert torch.allclose(own[:n], stock[:-k], atol=1e-4)


def test_heads_learn_what_the_target_says(text, tmp_path):
    """On a short text over and over each head comes close to the target's own distribution."""
    seen: list[list[float]] = []
    recipe = TrainingRecipe(120, 4, 0.02, warmup=5, save_every=60)

    def report(step: int, loss: float, found: list[float] | None) -> None:
        seen.extend([found] if found else [])

    target = tiny.llama()
    train_heads(teacher(text, target), tmp_path / "heads", 2, recipe, report)
    source = teacher(text, target)
    texts = source.authors.make_batch(source.texts.train, 8, 0, 0)
    fresh = measure(Heads.fresh(target, 2), target, texts, 8)
    taught = measure(Heads.load(tmp_path / "heads"), target, texts, 8)
    assert min(taught) > max(fresh) + 0.1, (taught, fresh)
    assert len(seen) == 2 and all(0 <= x <= 1 for x in seen[1])


def test_an_encoder_decoder_learns_from_its_own_answers(text, tmp_path):
    target = tiny.t5()
    source = teacher(text, target)
    assert source.authors.make_batch(source.texts.train, 2, 0, 1) == source.authors.make_batch(
        source.texts.train, 2, 0, 1
    )
    summary = train_heads(source, tmp_path / "heads", 2, RECIPE, lambda *said: None)
    assert 0 < min(summary["alpha"]) <= max(summary["alpha"]) <= 1
    spec = load(target, f"reproduction.heads:{tmp_path / 'heads'}", tokenizer=tiny.byte_level())
    assert spec.generate("It was", max_new_tokens=8, gamma=2)[0].stats.drafted


def test_the_command(text, tmp_path):
    folder = tiny.folder(tmp_path / "target", tiny.llama(), tiny.byte_level())
    out = tmp_path / "heads.safetensors"
    asked = ["train", "heads", "--target", folder, "--data", text, "--out", out, "--heads", 2]
    asked += ["--steps", 2, "--batch", 2, "--length", 8]
    done = CliRunner().invoke(cli.app, [str(word) for word in [*asked, "--json"]])
    assert done.exit_code == 0
    summary = json.loads(done.stdout)
    first, second = summary["alpha"]
    shown = CliRunner().invoke(cli.app, [str(word) for word in asked]).stdout.splitlines()
    assert shown[0].startswith(f"{out}: {summary['parameters']} parameters, 2 steps in ")
    for line, alpha in zip(shown[1:3], (first, second), strict=True):
        assert f"alpha {alpha:.3f} on held-out prompts" in line
    command = f"foretoken generate --target {folder} --draft reproduction.heads:{out} PROMPT"
    assert shown[3:] == [f"use it: {command}"]
    assert "step 2: alpha by head 0." in done.stderr
    spec = load(folder, f"reproduction.heads:{out}", runtime="transformers")
    assert spec.generate("It was", max_new_tokens=8, gamma=2)[0].stats.drafted
