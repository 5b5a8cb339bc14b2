"""`foretoken certify` as a user meets it."""

from __future__ import annotations

import json
from functools import partial

import pytest

from foretoken.certificate import certify as lab
from foretoken.certificate.certify import PlantedBug
from foretoken.certificate.planted_bugs import OffByOneModel, break_rule
from foretoken.cli import certify as command
from foretoken.drafters.lm import LMDrafter
from foretoken.loading import load as loading
from foretoken.sampling import speculation
from foretoken.sampling.acceptance_rules import speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.verifier import RULES_BY_NAME
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel


@pytest.fixture
def run(monkeypatch, console):
    """Call the console script, with few texts."""
    monkeypatch.setattr(lab, "DEFAULT_DISTRIBUTIONS", lab.DEFAULT_DISTRIBUTIONS[:1])
    monkeypatch.setattr(command, "BUILT_IN_PROMPTS", command.BUILT_IN_PROMPTS[:2])
    monkeypatch.setattr(lab, "CertificatePlan", partial(lab.CertificatePlan, num_samples=16))
    return partial(console, "certify")


@pytest.fixture
def quick(run, tmp_path, monkeypatch):
    """The same on a pair of tables."""
    p, q = random_model(3, 6), random_model(4, 6)
    spec = Speculator(TableModel(p, 6), LMDrafter(TableModel(q, 6), 6))
    monkeypatch.setattr(loading, "load_checked", lambda check, *_, **__: check(spec) or spec)
    (tmp_path / "ids").write_text("0\n3,1\n")
    return partial(run, "--prompts", tmp_path / "ids")


def pair(base, *more: object) -> tuple[object, ...]:
    where = ("--target", base / "target", "--draft", base / "draft")
    return (*where, "--runtime", "transformers", *more)


def test_a_certificate_for_reading(run, base):
    code, out, err = run(*pair(base))
    assert code == 0 and "greedy: plain" in err and "Traceback" not in err
    line = " ".join(out.split())  # folders' names are of any length
    for part in (
        "computed in float32, rule block, gamma 3, 2 prompts, seed 0",
        "logits of blocks against single tokens 144 positions ok off by ",
        "greedy output against plain 288 tokens ok",
        " 0 certain ",
        " ok temperature 1 target's distribution, by rank 288 tokens ",
        " pull towards the draft 288 tokens ",
        " against plain, prompt 1 16 outputs ",
        " next token from the wrong position: sampled output ",
        "LOSSLESS: no p-value of 9 tests is below ",
        "an exact pair would fail one certificate in 10,000",
    ):
        assert part in line, (part, line)
    assert "MISSED" not in out and "FAILED" not in out


def test_a_broken_rule_in_json(quick, monkeypatch):
    monkeypatch.setitem(RULES_BY_NAME, "broken", break_rule(speculative))
    monkeypatch.setattr(speculation, "RULE_NAMES", ("broken", *speculation.RULE_NAMES))
    code, out, _ = quick("--rule", "broken", "--json")
    document = json.loads(out)
    assert code == 1 and document["verdict"] == "not lossless"
    assert document["rule"] == "broken" and document["greedy_tokens"] > 0
    assert document["differences"] == []
    assert document["shapes"]["noise"] <= document["shapes"]["allowed"]
    least = min(document["tests"], key=lambda test: test["p_value"])
    assert least["p_value"] < document["level"] < 1e-4 and "target's distribution" in least["name"]


@pytest.mark.prove
def test_a_distribution_of_ones_own(quick):
    """Beside temperature 1, in place of the built-in distribution."""
    distribution = ("--temperature", 0.7, "--top-k", 5, "--top-p", 0.9, "--min-p", 0.01)
    code, out, _ = quick(*distribution, "--json")
    tests = {test["name"].partition(": ")[0] for test in json.loads(out)["tests"]}
    assert code == 0
    assert tests == {"temperature 1", "temperature 0.7, top-k 5, top-p 0.9, min-p 0.01"}


def test_distributions_that_are_built_in():
    one, two = lab.DEFAULT_DISTRIBUTIONS
    assert lab.choose_distributions(SamplingParams()) == (one, two)
    assert lab.choose_distributions(one) == (one,) and lab.choose_distributions(two) == (one, two)


def test_a_void_certificate_is_no_answer(quick, monkeypatch):
    missed = PlantedBug("a planted bug", found=False)
    monkeypatch.setattr(lab._Pair, "plant_wrong_rule", lambda pair: missed)
    code, out, _ = quick()
    assert code == 3 and "VOID" in out and "MISSED" in out


@pytest.mark.prove
def test_a_failure_of_the_tool_is_no_answer(quick, monkeypatch):
    def fails(*args: object) -> None:
        raise ValueError("zip() argument 2 is longer than argument 1")

    monkeypatch.setattr(lab._Pair, "plant_wrong_rule", fails)
    code, out, err = quick()
    assert code == 3 and not out and "Traceback" in err and "zip() argument 2" in err


@pytest.mark.prove
def test_a_gap_without_end_in_json(run, tmp_path, monkeypatch):
    """A bug that chooses what the target never would: its logit is minus infinity."""
    p = random_model(3, 6, zeros=0.5)
    spec = Speculator(
        OffByOneModel(TableModel(p, 6)), LMDrafter(TableModel(random_model(4, 6), 6), 6)
    )
    monkeypatch.setattr(loading, "load_checked", lambda check, *_, **__: check(spec) or spec)
    (tmp_path / "ids").write_text("0\n3,1\n")
    code, out, _ = run("--prompts", tmp_path / "ids", "--json")
    bugs = [one for one in json.loads(out)["differences"] if one["verdict"] == "bug"]
    assert code == 1 and any(one["gap"] is None for one in bugs)
    assert all(one["plain"] != one["speculative"] for one in bugs)
