"""Running a report: in order, resumed, with failures marked and the time left told."""

from __future__ import annotations

from dataclasses import replace
from datetime import date
from itertools import count
from typing import Any

import pytest

from foretoken.errors import InputError
from reproduction import results as module
from reproduction.recipe import Prompts
from reproduction.results import (
    Job,
    ResultFile,
    ResultLine,
    ResultOrigin,
    as_measured,
    jobs,
    run,
)
from reproduction.tests.laboratory import MACHINE, TablePairs, recipe


@pytest.fixture
def own(tmp_path):
    """A recipe of two experiments whose prompts can be read."""
    (tmp_path / "prompts.txt").write_text("a\nb\n")
    prompts = Prompts(file=str(tmp_path / "prompts.txt"))
    return recipe(prompts=prompts, experiments=["walltime", "acceptance"], gammas=[2])


@pytest.fixture
def measured(monkeypatch) -> list[dict[str, Any]]:
    """The cases that are measured, by an experiment that only notes them."""
    asked: list[dict[str, Any]] = []

    def measure(pairs, case):
        asked.append(case)
        if case["draft"] == "large":
            raise ValueError("no\nroom")
        if case["draft"] == "bigram" and "gamma" in case:
            raise InputError("no table")
        return {"figure": 1.0}

    monkeypatch.setattr(module, "Pairs", TablePairs)
    for name in ("acceptance", "walltime"):
        monkeypatch.setattr(module.EXPERIMENTS[name], "measure", measure)
    return asked


def test_draft_by_draft_and_in_the_pages_order(own):
    cases = jobs([own], MACHINE)
    order = [(job.case["draft"], job.experiment, job.case["temperature"]) for job in cases]
    assert order[:4] == [
        ("small", "acceptance", 0.0),
        ("small", "acceptance", 1.0),
        ("small", "walltime", 0.0),
        ("small", "walltime", 1.0),
    ]
    assert len(order) == 12 and order[4][0] == "large"


def test_the_latest_measurements_are_found_without_models_and_prompts(own, measured, tmp_path):
    results = ResultFile(tmp_path / "results.jsonl")
    with pytest.raises(InputError, match="has no measurement of tables"):
        as_measured([own], results)
    another = replace(MACHINE, cpu="another")
    before = jobs([own], another)
    list(run(before, results, another, "foretoken report"))
    (tmp_path / "prompts.txt").unlink()
    now = own.model_copy(update={"tokens": 777, "drafts": own.drafts[:1], "title": "Better"})
    again = as_measured([now], ResultFile(results.path))
    assert [job[1:] for job in again] == [job[1:] for job in before]
    then = again[0].recipe
    assert (then.tokens, then.drafts, then.title) == (own.tokens, own.drafts, "Better")
    (origin,) = results.origins(again[0].of)
    assert origin.machine == "another, 2 cores, 2 threads, foretoken 0"
    assert (origin.cases, origin.command) == (12, "foretoken report")
    assert origin.date == date.today().isoformat()


@pytest.mark.parametrize("case", [{"draft": "gone", "temperature": 1}, {"temperature": 1}, None])
def test_measurements_of_another_version_are_one_line(own, measured, tmp_path, case):
    """A case without its draft, or (None) a recipe with a key that there is none of now."""
    results = ResultFile(tmp_path / "results.jsonl")
    recipe = own.model_dump() | ({} if case else {"added": 1})
    results.add(ResultOrigin(of="x", recipe=recipe, cases=1, machine="m", date="d", command="c"))
    results.add(
        ResultLine(recipe="tables", of="x", experiment="acceptance", case=case or {}, seconds=1.0)
    )
    with pytest.raises(InputError, match="has tables as another version measured it, which"):
        as_measured([own], results)


def test_each_is_kept_and_none_is_measured_again(own, measured, tmp_path):
    cases, path = jobs([own], MACHINE), tmp_path / "results.jsonl"
    standings = run(cases, ResultFile(path), MACHINE, "report")
    for _ in range(4):  # three are done, and the fourth is to begin
        next(standings)
    standings.close()
    assert len(measured) == 3
    rest = list(run(cases, ResultFile(path), MACHINE, "report"))
    assert [done for done, *_ in rest] == list(range(3, 12))
    assert len(measured) == 12 and measured[3] == cases[3].case


def test_what_fails_says_why_and_is_tried_again(own, measured, tmp_path):
    cases, path = jobs([own], MACHINE), tmp_path / "results.jsonl"
    list(run(cases, ResultFile(path), MACHINE, "report"))
    results = ResultFile(path)
    reasons = {
        (job.experiment, job.case["draft"]): row.failed
        for job in cases
        if (row := results.row(job.of, job.experiment, job.case)) is not None
    }
    assert reasons["acceptance", "small"] is None
    assert reasons["acceptance", "large"] == "ValueError: no room"
    assert reasons["walltime", "bigram"] == "no table"
    measured.clear()
    list(run(cases, results, MACHINE, "report"))
    assert {case["draft"] for case in measured} == {"large", "bigram"} and len(measured) == 6


def test_the_time_left_is_of_measurements_alike(own, measured, tmp_path, monkeypatch):
    """Of the same experiment's, or else all the recipe's; those that failed tell nothing."""
    monkeypatch.setattr(module, "perf_counter", count(step=100.0).__next__)
    cases = [job for job in jobs([own], MACHINE) if job.case["draft"] == "small"]
    results = ResultFile(tmp_path / "results.jsonl")
    left = [seconds for *_, seconds in run(cases, results, MACHINE, "report")]
    assert left == [None, 300.0, 200.0, 100.0]


def test_a_figure_that_is_no_number_is_a_failure(own, measured, tmp_path, monkeypatch):
    nan = {"figure": float("nan")}
    monkeypatch.setattr(module.EXPERIMENTS["acceptance"], "measure", lambda pairs, case: nan)
    cases, results = jobs([own], MACHINE)[:1], ResultFile(tmp_path / "results.jsonl")
    list(run(cases, results, MACHINE, "report"))
    row = results.row(cases[0].of, "acceptance", cases[0].case)
    assert row is not None and row.failed is not None and "not JSON compliant" in row.failed


def test_ctrl_c_is_no_failure(own, measured, tmp_path, monkeypatch):
    def interrupted(pairs, case):
        raise KeyboardInterrupt

    monkeypatch.setattr(module.EXPERIMENTS["acceptance"], "measure", interrupted)
    cases: list[Job] = jobs([own], MACHINE)
    results = ResultFile(tmp_path / "results.jsonl")
    with pytest.raises(KeyboardInterrupt):
        list(run(cases, results, MACHINE, "report"))
    assert ResultFile(results.path).last("tables") is None
