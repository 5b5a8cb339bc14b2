"""The draft and gamma to use, from figures written by hand, and a benchmark's file."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import InputError
from foretoken.measurement.plan import FORMAT, Plan, choose, read_plan


def row(draft: str, gamma: int | None, speedup: float, batch: int = 1, wide: float = 0.0) -> Any:
    spread = {"median": speedup, "q1": speedup - wide, "q3": speedup + wide, "n": 5}
    return {"draft": draft, "gamma": gamma, "batch": batch, "speedup": spread}


def chosen(*rows: Any) -> Plan:
    return choose(list(rows), 0.7, {"target": "t", "dtype": "int8"})


def test_the_fastest_draft_and_gamma():
    plan = chosen(row("a", 0, 1), row("a", 2, 1.3), row("b", 0, 1), row("b", 4, 1.5))
    assert (plan.draft, plan.gamma, plan.automatic, plan.speedup) == ("b", 4, False, 1.5)
    assert plan.speculate and plan.certain and plan.temperature == 0.7
    assert plan.load == {"target": "t", "dtype": "int8", "draft": "b"}


def test_automatic_gamma_and_the_fixed_one_for_systems_without():
    plan = chosen(row("a", 0, 1), row("a", 2, 1.3), row("a", 4, 1.2), row("a", None, 1.4))
    assert (plan.draft, plan.gamma, plan.automatic, plan.speedup) == ("a", 2, True, 1.4)


def test_one_setting_for_all_numbers_of_texts_at_once():
    few = row("a", 0, 1), row("a", 2, 1.2), row("a", 8, 2.0)
    many = row("a", 0, 1, 8), row("a", 2, 1.2, 8), row("a", 8, 0.5, 8)
    plan = chosen(*few, *many)
    assert plan.gamma == 2 and plan.speedup == pytest.approx(1.2)


def test_do_not_speculate():
    plan = chosen(row("a", 0, 1), row("a", 2, 0.9), row("a", None, 0.98, wide=0.01))
    assert (plan.draft, plan.gamma, plan.automatic) == ("none", 0, False)
    assert not plan.speculate and plan.tried == "a" and plan.speedup == 0.98 and plan.certain
    assert plan.load["draft"] == "none"
    assert chosen(row("none", 0, 1)).tried == "none"  # nothing was drafted


@pytest.mark.parametrize("speedup", [0.98, 1.02])
def test_quartiles_around_1_are_told(speedup: float):
    assert not chosen(row("a", 0, 1), row("a", 2, speedup, wide=0.03)).certain


def test_a_file_is_read_or_refused_by_name(tmp_path: Path):
    plan, file = chosen(row("a", 0, 1), row("a", 2, 1.3)), tmp_path / "b.json"
    file.write_text(json.dumps({"format": FORMAT, "best": asdict(plan)}))
    assert read_plan(file) == plan
    for text, said in (
        ("{", "not valid JSON"),
        ("[1]", "not a benchmark; make one with foretoken bench --out"),
        (json.dumps({"format": FORMAT, "best": asdict(plan) | {"gamma": "x"}}), "b.json: best: "),
        (json.dumps({"format": FORMAT}), "b.json: best: "),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=said):
            read_plan(file)
    with pytest.raises(InputError, match="there is no such file"):
        read_plan(tmp_path / "none.json")
