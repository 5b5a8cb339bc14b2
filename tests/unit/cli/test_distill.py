"""`foretoken train distill` as a user meets it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

import foretoken
from console import Run, mistake
from foretoken.cli.train import fields
from foretoken.errors import InputError
from foretoken.speculator import Speculator
from tiny import TEXT, byte_level, folder, llama, t5

SHORT = ("--length", 6, "--held-out", 2, "--batch", 2, "--steps", 4, "--save-every", 2)
SHAPE = ("--shape", "num_hidden_layers=1,hidden_size=16")


@pytest.fixture
def run(console: Run) -> Run:
    return partial(console, "train", "distill")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("distill")
    folder(base / "target", llama(), byte_level())
    folder(base / "t5", t5(), byte_level())
    folder(base / "bare", llama())
    (base / "text").mkdir()
    (base / "text" / "a.txt").write_text(TEXT * 20, encoding="utf-8")
    (base / "sources.txt").write_text("It was\n" * 20)
    return base


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
    assert other.code == 2 and "was begun with loss lk, not tv" in other.err
    further = ("--target", base / "target", "--data", base / "text", "--out", tmp_path / "more")
    assert run(*further, "--draft", draft, *SHORT).code == 0


@pytest.mark.prove
def test_an_encoder_decoder_with_sources_alone(run, base, tmp_path):
    args = ("--target", base / "t5", "--data", base / "sources.txt", "--out", tmp_path / "run")
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
    assert result.code == 130 and "the same command goes on from" in result.err
    assert (tmp_path / "run" / "checkpoint.pt").exists()
    monkeypatch.undo()


@pytest.mark.parametrize(
    "args, said",
    [
        (("--loss", "mse"), "loss is 'mse'; give one of kl, rkl, jsd, tv, nla, lk"),
        (("--temperature", -1), "temperature is -1.0; give 0 (greedy) or more"),
        (("--on-policy", 2), "on_policy is 2.0; give a share in [0, 1]"),
        (("--steps", 0), "steps is 0; give 1 or more"),
        (("--data", "no"), "there is no no; give text, or lines of sources"),
        (("--target", "bare"), "the target has no tokenizer"),
        (("--shape", "hidden_size"), "shape has 'hidden_size'; give name=value"),
        (("--shape", "width=3"), "width is no size of a llama model"),
        (("--out", "text/a.txt/run"), "text/a.txt/run"),
    ],
)
def test_mistakes_are_one_line(run, base, tmp_path, monkeypatch, args, said):
    monkeypatch.chdir(base)
    arguments = {"--target": "target", "--data": "text", "--out": tmp_path / "run"}
    arguments |= {"--shape": SHAPE[1], args[0]: args[1]}
    result = run(*(part for pair in arguments.items() for part in pair))
    assert result.code == 2 and result.err.startswith("error: ") and said in result.err
    assert result.err.count("\n") == 1 and not result.out
    assert not (tmp_path / "run").exists()


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
    values = fields("num_hidden_layers=1, rms_norm_eps=1e-5,tie=true,hidden_act=gelu")
    assert values == {
        "num_hidden_layers": 1, "rms_norm_eps": 1e-5, "tie": True, "hidden_act": "gelu"
    }  # fmt: skip
    assert fields(None) == {} == fields("")
    for wrong in ("a", "=1", "a="):
        with pytest.raises(InputError, match="shape has"):
            fields(wrong)
