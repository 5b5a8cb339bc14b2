"""Every script of benchmarks/ can be imported, and the small computations in them."""

from __future__ import annotations

import json
from dataclasses import fields

import pytest

from foretoken.costing.costs import Costs
from foretoken.costing.gamma import Fixed
from foretoken.measurement.machine import Machine
from scripts import BENCHMARKS, benchmark


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_script_imports(name: str):
    assert benchmark(name).__doc__


def test_a_replay_by_hand():
    """Four tokens: draft tokens at places 0, 2 and 3 are kept, the one at 1 is not, so that two
    steps with a draft token accepted in each make them. A guess costs a tenth of a pass."""
    replay = benchmark("replay")
    costs = Costs(((0, 0.0), (16, 1.6)), ((1, 1.0), (17, 1.0)), ((1, 0.0),))
    text = replay.Text(4, [1.0, 0.0, 1.0, 1.0] + [0.0] * 20, [0.5] * 24)
    seconds, row = replay.replay(Fixed(1), text, costs)
    assert [step.accepted for step in row.records] == [1, 1] and seconds == pytest.approx(2.2)
    seconds, row = replay.replay(replay.Oracle(text), text, costs)
    assert [step.drafted for step in row.records] == [1, 1] and seconds == pytest.approx(2.2)
    seconds, row = replay.replay(Fixed(2), text, costs)
    assert [step.accepted for step in row.records] == [1, 1] and seconds == pytest.approx(2.3)


def test_a_result_is_headed_by_its_machine(tmp_path, monkeypatch):
    machine = benchmark("machine")
    monkeypatch.setattr(machine, "RESULTS", tmp_path)
    path = machine.save("name", {"rows": [1]})
    result = json.loads(path.read_text())
    assert path.name == f"name-{result['machine']['date']}.json" and result["rows"] == [1]
    lab = [field.name for field in fields(Machine)]
    assert list(result["machine"]) == ["date", "system", *lab, "abilities", "held to"]


def test_a_line_of_a_table():
    figure = {
        "name": "foretoken",
        "variant": "gamma 3",
        "seconds_per_token": {"median": 0.01, "q1": 0.009, "q3": 0.012},
        "first_seconds": {"median": 0.2},
        "tokens_per_call": 2.5,
        "measured_over_predicted": None,
        "speedup": 1.5,
    }
    line = "| gamma 3 | 10.00 (9.00-12.00) | 200 | 2.50 | 1.50x |  |"
    assert benchmark("tables").line(figure) == line
    peer = {"name": "a peer", "tokens_per_call": None}
    assert benchmark("tables").line(figure | peer).startswith("| a peer, gamma 3 |")


def test_a_line_of_texts_at_once():
    figure = {
        "name": "a peer",
        "variant": "plain",
        "tokens_per_second": {"median": 60.0, "q1": 55.5, "q3": 61.0},
        "speedup": 0.75,
        "occupancy": None,
        "padding": None,
    }
    line = "| 8 | a peer, plain | 60.0 (55.5-61.0) | 0.75x |  |  |"
    rates = benchmark("tables").rates
    assert rates(8, figure) == line
    own = {"name": "foretoken", "occupancy": 0.94, "padding": 0.0}
    assert rates(8, figure | own).endswith("| 0.75x | 94% | 0% |")
