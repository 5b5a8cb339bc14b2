"""`costs` and `simulate` as a user meets them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from console import Run, mistake
from foretoken.costing.costs import Costs
from reproduction.costs import FleetCosts, MeasuredText, ServingCosts
from tiny import byte_level, folder, llama

COSTS = Costs(((0, 0.0), (1, 0.1)), ((1, 1.0), (8, 1.0)), ((1, 0.0),))
SERVING = ServingCosts(1, COSTS, ((1, 1.0),), ((0, 0.0),), ((1, 0.0),), 0.5)
SHORT = ("--requests", 6, "--output-tokens", 1, "--gamma", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path, texts = tmp_path / "m.json", (MeasuredText(4, (0.5,)),)
    FleetCosts("today", "target", "draft", "a cpu", "p.txt", 0.0, SERVING, texts).save(path)
    return path


def test_a_row_for_every_rate_and_what_is_too_much(console: Run, file: Path):
    arguments = ("simulate", "--measurement", file, *SHORT, "--rate", 0.001, "--rate", 2)
    result = console(*arguments)
    assert result.code == 0 and "0.001 requests a second" in result.err
    assert "1 x target with draft draft, up to 1 rows each" in result.out
    assert "at most 0.667 requests a second can be answered" in result.out
    assert "2 requests a second are too many: the queue grows" in result.out
    assert "give 4 replicas or more" in result.out  # 3 of them answer just as many
    report = json.loads(console(*arguments, "--json").out)
    slow, fast = report["rates"]
    assert slow["whole"] == {"p50": 1.5, "p99": 1.5} and not slow["overloaded"]
    assert fast["whole"] is None and fast["overloaded"] and report["fleet"]["requests"] == 6


def test_mistakes_are_one_line(console: Run, file: Path, tmp_path: Path):
    plain = tmp_path / "plain.json"
    plain.write_text("{}")
    for arguments, message in (
        (("--measurement", file, "--rate", 0), "'--rate': it must be 1e-06 or more, not '0'"),
        (("--measurement", file, "--rate", "inf"), "'--rate': it must be 1000000000.0 or less"),
        (
            ("--measurement", file, "--rate", 1, "--replicas", 0),
            "'--replicas': it must be 1 or more, not '0'",
        ),
        (("--measurement", plain, "--rate", 1), "make one with python -m reproduction costs --out"),
        (("--measurement", tmp_path / "none", "--rate", 1), "there is no"),
    ):
        mistake(console("simulate", *arguments), message)


def test_costs_of_a_tiny_pair_are_simulated(console: Run, tmp_path: Path):
    target = folder(tmp_path / "target", llama(320, context=64), byte_level())
    draft = folder(tmp_path / "draft", llama(320, num_hidden_layers=1), byte_level())
    prompts, out = tmp_path / "prompts.txt", tmp_path / "m.json"
    prompts.write_text("It was\nOnce upon\n")
    given = ("--target", target, "--prompts", prompts, "--out", out, "--max-new-tokens", 4)
    measure = ("costs", *given, "--draft")
    result = console(*measure, draft, "--rows", 2)
    assert result.code == 0 and "python -m reproduction simulate" in result.out
    result = console("simulate", "--measurement", out, "--rate", 1, "--requests", 5)
    assert result.code == 0 and "up to 2 rows each" in result.out
    mistake(console(*measure, draft, "--rows", 0), "'--rows': it must be 1 or more")
    mistake(console(*measure, "none"), "makes no draft tokens")
