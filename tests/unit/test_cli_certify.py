"""`foretoken certify` as a user meets it."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from foretoken import loading, options
from foretoken.cli import certify as command
from foretoken.drafters.lm import LMDrafter
from foretoken.judge import NAMED
from foretoken.lab import certify as lab
from foretoken.lab.controls import OffByOne, next_row
from foretoken.models.table import TableModel
from foretoken.speculator import Speculator
from foretoken.verify import speculative
from oracle import random_model
from tiny import byte_level, folder, llama


@pytest.fixture
def run(monkeypatch, console):
    """Call the console script, with few texts."""
    monkeypatch.setattr(lab, "LAWS", lab.LAWS[:1])
    monkeypatch.setattr(command, "PROMPTS", command.PROMPTS[:2])
    monkeypatch.setattr(command, "TEXTS", 16)
    return partial(console, "certify")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target` and `draft`, `bare` without a tokenizer."""
    base = tmp_path_factory.mktemp("certify")
    model = llama(320, eos_token_id=None)
    folder(base / "target", model, byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "bare", model)
    return base


def pair(base: Path, *more: object) -> tuple[object, ...]:
    where = ("--target", base / "target", "--draft", base / "draft")
    return (*where, "--runtime", "transformers", *more)


def test_a_certificate_for_reading(run, base):
    code, out, err = run(*pair(base))
    assert code == 0 and "greedy: plain" in err and "Traceback" not in err
    for says in (
        "computed in float32, rule block, gamma 3, 2 prompts, seed 0",
        "passes   a block's logits are within ",
        "greedy   6 texts of 288 tokens, gamma 1 and 3, against plain: identical",
        "said to be certain: all as said",
        "temperature 1: pull towards the draft",
        "temperature 1: against plain, oddest: prompt ",
        "control  replacement from the wrong position: sampled text: found, as it must be",
        "LOSSLESS: no test of 9 fell below ",
        "an exact pair would fail one certificate in 10,000",
    ):
        assert says in out


def test_a_broken_rule_in_json(run, base, monkeypatch):
    monkeypatch.setitem(NAMED, "broken", next_row(speculative))
    monkeypatch.setattr(options, "RULES", ("broken", *options.RULES))
    code, out, _ = run(*pair(base, "--rule", "broken", "--json"))
    found = json.loads(out)
    assert code == 1 and found["verdict"] == "not lossless"
    assert any("target's law, by rank: p-value" in fault for fault in found["faults"])
    assert found["plan"]["rule"] == "broken" and found["false_alarm"] == 1e-4
    assert found["identity"]["same"] == found["identity"]["tokens"] == 288
    assert found["shapes"]["noise"] <= found["shapes"]["allowed"]
    least = min(test["p_value"] for test in found["tests"])
    assert least < found["level"] < 1e-4


def test_a_gap_without_end_in_json(run, tmp_path, monkeypatch):
    """A bug that chooses what the target never would: its logit is minus infinity."""
    p = random_model(3, 6, zeros=0.5)
    spec = Speculator(OffByOne(TableModel(p, 6)), LMDrafter(TableModel(random_model(4, 6), 6), 6))
    monkeypatch.setattr(loading, "load", lambda *args, **options: spec)
    (tmp_path / "ids").write_text("0\n3,1\n")
    code, out, _ = run("--prompts", tmp_path / "ids", "--json")
    bugs = [one for one in json.loads(out)["identity"]["differences"] if one["verdict"] == "bug"]
    assert code == 1 and any(one["gap"] is None for one in bugs)
    assert all(one["plain"] != one["speculative"] for one in bugs)


def test_mistakes(run, base, tmp_path):
    for args, says in (
        (pair(base, "--gamma", 0), "gamma is 0; give 1 or more to certify a draft"),
        (pair(base, "--rule", "no"), "rule is 'no'; give one of"),
        (pair(base, "--limit", 0, "--prompts", tmp_path / "no"), "limit is 0"),
        (pair(base, "--prompts", tmp_path / "no.txt"), "no.txt cannot be read"),
        (("--target", base / "target", "--draft", "none"), "draft is none; give one that guesses"),
        (("--target", base / "bare"), "no tokenizer; give --prompts with ids"),
    ):
        code, out, err = run(*args)
        assert code == 2 and not out and says in err and err.count("\n") == 1
