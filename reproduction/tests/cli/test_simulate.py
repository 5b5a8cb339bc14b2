"""`python -m reproduction simulate` as a user meets it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path

import pytest
from measurements import document

from console import Run, mistake
from foretoken.costing.costs import Costs
from reproduction.measurement import Serving

COSTS = Costs(((0, 0.0), (1, 0.1)), ((1, 1.0), (8, 1.0)), ((1, 0.0),))
SERVING = Serving(1, COSTS, ((1, 1.0),), ((0, 0.0),), ((1, 0.0),), 0.5)
SHORT = ("--requests", 6, "--output-tokens", 1, "--gamma", 0)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "m.json"
    path.write_text(json.dumps(document([0.5], 0.1) | {"serving": asdict(SERVING)}))
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
    plain.write_text(json.dumps(document([0.5], 0.1)))
    for arguments, message in (
        (("--measurement", file, "--rate", 0), "'--rate': it must be 1e-06 or more, not '0'"),
        (("--measurement", file, "--rate", "inf"), "'--rate': it must be 1000000000.0 or less"),
        (
            ("--measurement", file, "--rate", 1, "--replicas", 0),
            "'--replicas': it must be 1 or more, not '0'",
        ),
        (("--measurement", plain, "--rate", 1), "measure again with foretoken measure --rows 16"),
        (("--measurement", tmp_path / "none", "--rate", 1), "there is no"),
    ):
        mistake(console("simulate", *arguments), message)
