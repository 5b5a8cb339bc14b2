"""The draft and gamma to use, from figures written by hand, and a benchmark's file."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import InputError
from foretoken.measurement.plan import BENCH_FILE_FORMAT, Plan, PlanOptions, choose_plan, read_plan

pytestmark = pytest.mark.daily

AS_MEASURED = PlanOptions(None, "coupled", 0.7, 0, 0.9)


def row(
    draft: str,
    gamma: int | None,
    speedup: float,
    batch: int = 1,
    *,
    wide: float = 0.0,
    rounds: int = 5,
    others: float | None = None,
) -> Any:
    spread = {"median": speedup, "q1": speedup - wide, "q3": speedup + wide, "n": rounds}
    about = {"draft": draft, "gamma": gamma, "batch": batch, "others": others}
    return {**about, "speedup": spread}


def chosen(*rows: Any, **load: Any) -> Plan:
    return choose_plan(list(rows), AS_MEASURED, {"target": "t", "dtype": "int8", **load})


def test_the_fastest_draft_and_gamma():
    plan = chosen(row("a", 0, 1), row("a", 2, 1.3), row("b", 0, 1), row("b", 4, 1.5))
    assert (plan.draft, plan.gamma, plan.speedup) == ("b", 4, 1.5)
    assert plan.speculate and plan.certain and plan.generate == replace(AS_MEASURED, gamma=4)
    assert plan.load == {"target": "t", "dtype": "int8", "draft": "b"}


def test_automatic_gamma_and_the_fixed_one_for_systems_without():
    plan = chosen(row("a", 0, 1), row("a", 2, 1.3), row("a", 4, 1.2), row("a", None, 1.4))
    assert (plan.draft, plan.gamma, plan.speedup, plan.generate.gamma) == ("a", 2, 1.4, None)


def test_one_setting_for_all_numbers_of_texts_at_once():
    few = row("a", 0, 1), row("a", 2, 1.2), row("a", 8, 2.0)
    many = row("a", 0, 1, 8), row("a", 2, 1.2, 8), row("a", 8, 0.5, 8)
    plan = chosen(*few, *many)
    assert plan.gamma == 2 and plan.speedup == pytest.approx(1.2)


def test_do_not_speculate():
    plan = chosen(row("a", 0, 1), row("a", 2, 0.9), row("a", None, 0.98, wide=0.01))
    assert (plan.draft, plan.gamma, plan.generate.gamma) == ("none", 0, 0)
    assert not plan.speculate and plan.tried == "a" and plan.speedup == 0.98 and plan.certain
    assert plan.load["draft"] == "none"
    assert chosen(row("none", 0, 1)).tried == "none"  # nothing was drafted


@pytest.mark.parametrize("speedup", [0.98, 1.02])
def test_quartiles_around_1_are_told(speedup: float):
    plan = chosen(row("a", 0, 1), row("a", 2, speedup, wide=0.03))
    assert not plan.certain and plan.draft == "none" and plan.tried == "a"


def test_a_certain_gain_goes_before_a_larger_one():
    plan = chosen(row("a", 0, 1), row("a", 2, 1.2, wide=0.1), row("b", 4, 1.5, wide=0.6))
    assert (plan.draft, plan.gamma, plan.speedup, plan.certain) == ("a", 2, 1.2, True)


@pytest.mark.parametrize("how", [{"rounds": 2}, {"others": 0.3}])
@pytest.mark.parametrize("speedup", [0.5, 1.5])
def test_of_few_rounds_or_beside_other_processes_nothing_is_certain(how: Any, speedup: float):
    plan = chosen(row("a", 0, 1), row("a", 2, speedup, **how))
    assert (plan.draft, plan.certain, plan.tried) == ("none", False, "a")


def test_options_of_a_draft_stay_where_they_are_needed():
    rows = row("self:int8", 0, 1), row("self:int8", 2, 1.5)
    assert chosen(*rows, draft_dtype="int8").load.keys() == {"target", "dtype", "draft"}
    slow = row("a", 0, 1), row("a", 2, 0.5)
    assert "draft_revision" not in chosen(*slow, draft_revision="x").load
    assert chosen(row("a", 0, 1), row("a", 2, 2), draft_dtype="int8").load["draft_dtype"] == "int8"


def test_a_file_is_read_or_refused_by_name(tmp_path: Path):
    plan, file = chosen(row("a", 0, 1), row("a", 2, 1.3)), tmp_path / "b.json"
    file.write_text(json.dumps({"format": BENCH_FILE_FORMAT, "best": asdict(plan)}))
    assert read_plan(file) == plan
    for text, said in (
        ("{", "not valid JSON"),
        ("[1]", "not a benchmark; make one with foretoken bench --out"),
        (
            json.dumps({"format": BENCH_FILE_FORMAT, "best": asdict(plan) | {"gamma": "x"}}),
            "b.json: best: ",
        ),
        (json.dumps({"format": BENCH_FILE_FORMAT}), "has no results yet"),
        (wrong(plan, {}), "b.json: best: load has no target"),
        (wrong(plan, {"target": "t", "dtyp": "int8"}), "best: dtyp is not an option of load"),
        (wrong(plan, {"target": "t", "dtype": "int7"}), "best: dtype is 'int7'"),
    ):
        file.write_text(text)
        with pytest.raises(InputError, match=said):
            read_plan(file)
    with pytest.raises(InputError, match="^[^ ]*none.json cannot be read: there is no such file"):
        read_plan(tmp_path / "none.json")
    with pytest.raises(InputError, match="cannot be read"):
        read_plan(tmp_path)


def wrong(plan: Plan, load: dict[str, Any]) -> str:
    return json.dumps({"format": BENCH_FILE_FORMAT, "best": asdict(plan) | {"load": load}})
