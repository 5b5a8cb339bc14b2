"""`foretoken train distill` as a user meets it."""

from __future__ import annotations

import json
from functools import partial

import pytest

import foretoken
from console import Run, mistake
from foretoken.cli.train import parse_shape
from foretoken.errors import InputError
from foretoken.speculator import Speculator

SHORT = ("--length", 6, "--held-out", 2, "--batch", 2, "--steps", 4, "--save-every", 2)
SHAPE = ("--shape", "num_hidden_layers=1,hidden_size=16")


@pytest.fixture
def run(console: Run) -> Run:
    return partial(console, "train", "distill")


def test_a_draft_is_taught_and_used(run, base, tmp_path):
    args = ("--target", base / "target", "--data", base / "text", "--out", tmp_path / "run", *SHORT)
    shares = ("--on-policy", 0.5, "--target-generated", 0.5)
    result = run(*args, *SHAPE, *shares, "--json")
    assert result.code == 0
    summary = json.loads(result.out)
    assert summary["steps"] == 4 and summary["alpha"] >= summary["alpha_before"] > 0
    for step in (0, 2, 4):
        assert f"step {step}: held-out alpha 0." in result.err
    draft = tmp_path / "run" / "model"
    shown = run(*args, *SHAPE, *shares).out  # nothing is left to do
    parameters = f"{summary['parameters']} parameters, 4 steps in "
    assert shown.startswith(f"{draft}: {parameters}")
    assert (
        f"alpha {summary['alpha']:.4f} on held-out prompts at step {summary['best_step']}" in shown
    )
    command = f"foretoken generate --target {base / 'target'} --draft {draft} PROMPT"
    assert shown.endswith(f"\nuse it: {command}\n")
    spec = foretoken.load(base / "target", draft)
    assert spec.generate("It was", max_new_tokens=5, gamma=2)[0].stats.drafted
    other = run(*args, *SHAPE, "--loss", "tv")
    assert other.code == 2 and "began with loss lk, not tv" in other.err
    further = ("--target", base / "target", "--data", base / "text", "--out", tmp_path / "more")
    assert run(*further, "--draft", draft, *SHORT).code == 0


@pytest.mark.prove
def test_an_encoder_decoder_with_sources_alone(run, base, tmp_path):
    (tmp_path / "sources.txt").write_text("It was\n" * 20)
    args = ("--target", base / "t5", "--data", tmp_path / "sources.txt", "--out", tmp_path / "run")
    result = run(*args, "--shape", "num_layers=1,num_decoder_layers=1", *SHORT, "--json")
    assert result.code == 0 and json.loads(result.out)["alpha"] > 0
    spec = foretoken.load(base / "t5", tmp_path / "run" / "model")
    assert spec.generate("It was", max_new_tokens=5, gamma=2)[0].tokens


def test_interrupted_while_a_text_is_written(run, base, tmp_path, monkeypatch):
    spec = Speculator
    generate, calls = spec.generate, []

    def interrupted(self, *args, **options):
        calls.append(1)
        completions = generate(self, *args, **options)
        if len(calls) == 4:  # the exam, two steps, and then
            object.__setattr__(completions[0], "finish_reason", "interrupted")
        return completions

    monkeypatch.setattr(spec, "generate", interrupted)
    args = ("--target", base / "target", "--data", base / "text", "--out", tmp_path / "run")
    result = run(*args, *SHAPE, *SHORT, "--on-policy", 1)
    assert result.code == 130 and "the same command resumes from" in result.err
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    monkeypatch.undo()


def test_a_disk_too_full_for_the_draft_leaves_the_last_one(run, base, tmp_path, full_disk):
    out = tmp_path / "run"
    args = ("--target", base / "target", "--data", base / "text", "--out", out, *SHORT, *SHAPE)
    assert run(*args).code == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    for file in ("model.safetensors", "tokenizer.json"):  # each library has errors of its own
        with full_disk((out / "model" / file).stat().st_size // 2):
            mistake(run(*args), f"{out / 'model'} cannot be written: ")
        assert before == {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run(*args).code == 0 and not list(out.glob("*.part"))


def test_fields_of_a_shape():
    values = parse_shape("num_hidden_layers=1, rms_norm_eps=1e-5,tie=true,hidden_act=gelu")
    assert values == {
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "tie": True, "hidden_act": "gelu"
    }  # fmt: skip
    assert parse_shape(None) == {} == parse_shape("")
    for wrong in ("a", "=1", "a="):
        with pytest.raises(InputError, match="shape has"):
            parse_shape(wrong)
