"""Queues whose answers are known, and what is said of loads beyond what a fleet can do."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.costing.costs import Costs
from foretoken.errors import InputError
from reproduction.costs import FleetCosts, MeasuredText, ServingCosts, load
from reproduction.fleet import PaperFleet, Simulated, capacity, simulate

PLAIN = Costs(((0, 0.0), (1, 0.1)), ((1, 1.0), (8, 1.0)), ((1, 0.0),))
ONE = ServingCosts(1, PLAIN, ((1, 1.0),), ((0, 0.0),), ((1, 0.0),), 0.5)
TASK = PaperFleet(requests=100, prompt_tokens=1, output_tokens=1, gamma=0)
SERVICE = 0.5 + 1.0  # to take a request on, and a step


def measured(serving: ServingCosts = ONE, temperature: float = 0.0) -> FleetCosts:
    texts = (MeasuredText(4, (0.5,)),)
    day = "2026-11-01T00:00:00+00:00"
    return FleetCosts(day, "target", "draft", "a cpu", "p.txt", temperature, serving, texts)


def run(fleet: PaperFleet, rate: float, serving: ServingCosts = ONE, **more: Any) -> Simulated:
    file = measured(serving, **more)
    return simulate(file, fleet, rate, capacity=capacity(file, fleet))


def test_a_queue_before_one_row_is_as_known():
    """M/D/1: at a load of 0.3 a request waits with probability 0.3, so the median does not."""
    assert capacity(measured(), TASK) == pytest.approx(1 / SERVICE)
    idle, busy = (run(TASK, load / SERVICE) for load in (0.3, 0.8))
    assert idle.whole and busy.whole and idle.first_token
    assert idle.whole["p50"] == idle.first_token["p50"] == pytest.approx(SERVICE)
    assert busy.whole["p50"] > SERVICE
    assert busy.whole["p99"] > idle.whole["p99"] > SERVICE
    assert idle.utilisation == pytest.approx(0.3, abs=0.06)  # two sigmas of 100 gaps; one seed
    assert idle.mean_batch == pytest.approx(1) and idle.tokens_per_call == 1
    assert idle.accepted_per_drafted is None


def test_replicas_share_the_requests():
    two = replace(TASK, replicas=2)
    assert capacity(measured(), two) == pytest.approx(2 / SERVICE)
    one, both = run(TASK, 0.5), run(two, 0.5)
    assert one.whole and both.whole and both.whole["p99"] < one.whole["p99"]
    assert both.utilisation == pytest.approx(one.utilisation / 2, rel=0.1)


def test_a_load_that_is_too_much_has_no_latencies():
    result = run(TASK, 1.01 / SERVICE)
    assert result.overloaded and result.whole is None and result.first_token is None
    assert not run(TASK, 0.99 / SERVICE).overloaded


def test_the_same_seed_is_the_same_fleet():
    sampled = replace(TASK, gamma=2, requests=8, output_tokens=4)
    first, again = (run(sampled, 0.05, temperature=1.0) for _ in range(2))
    assert first == again != run(replace(sampled, seed=1), 0.05, temperature=1.0)
    assert first.accepted_per_drafted is not None and 0 < first.accepted_per_drafted < 1


def test_costs_come_back_from_a_file(tmp_path: Path):
    measured().save(tmp_path / "m.json")
    assert load(tmp_path / "m.json") == measured()


@pytest.mark.parametrize(
    "wrong",
    [
        {"rows": 0},
        {"joining": -0.1},
        {"around": ((1, -1.0),)},
        {"reading": ()},
        {"costs": replace(PLAIN, score=())},
    ],
)
def test_costs_that_cannot_be_are_refused(wrong: dict[str, Any], tmp_path: Path):
    measured(replace(ONE, **wrong)).save(tmp_path / "m.json")
    with pytest.raises(InputError, match="m.json: serving: .*"):
        load(tmp_path / "m.json")


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"date": 1}', "\xff"])
def test_files_that_hold_no_costs_are_refused(text: str, tmp_path: Path):
    (tmp_path / "m.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(InputError, match="m.json: .*"):
        load(tmp_path / "m.json")


def test_requests_that_the_target_cannot_hold_are_refused():
    """As the engine refuses them."""
    short = replace(ONE, context=100)
    fits, long = replace(TASK, prompt_tokens=90), replace(TASK, prompt_tokens=90, output_tokens=11)
    assert run(replace(fits, output_tokens=10), 0.01, short).whole
    assert run(long, 0.001).whole  # no limit
    with pytest.raises(InputError, match="a request has up to 101 tokens, the measured target hol"):
        run(long, 0.01, short)
