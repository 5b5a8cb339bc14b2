"""Costs on disk: what is kept of them, when they are measured again, and what real steps say."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from foretoken.costing import stored_costs
from foretoken.costing.costs import Costs
from foretoken.costing.stored_costs import (
    COSTS_FILE,
    FIRST_RETRY_SECONDS,
    MAX_COST_RATIO,
    MAX_RETRY_SECONDS,
    MIN_MONITORED_STEPS,
    DriftMonitor,
    StoredCosts,
    load_costs,
    load_or_measure,
    make_identity,
    make_key,
    store_contradiction,
    store_costs,
)
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.models.stock.model import CausalModel
from foretoken.records import StepRecord
from foretoken.storage.cache import load_cached_values, save_cached_value
from table import TableModel
from tiny import llama

KNOWN = Costs(((0, 0.0), (4, 0.8)), ((1, 2.0), (5, 3.0)), ((1, 0.0), (5, 0.2)))
OTHER = Costs(((0, 0.0), (4, 0.4)), ((1, 2.0), (5, 3.0)), ((1, 0.0), (5, 0.2)))
GOOD, POOR = StoredCosts(KNOWN, 1.1, 0.0, when=0.0), StoredCosts(KNOWN, 1.2, 0.3, when=0.0)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The seconds of the day, to be set."""
    now = [0.0]
    monkeypatch.setattr(stored_costs, "time", lambda: now[0])
    return now


def never() -> StoredCosts:
    raise AssertionError("measured again")


def test_what_was_kept_is_recalled():
    store_costs("a", GOOD)
    store_costs("b", StoredCosts(OTHER, None, None, "T, D, greedy, batch size 1", 3.0, 2, 1.7))
    assert load_costs("a") == GOOD and load_costs("c") is None
    assert load_costs("b") == StoredCosts(
        OTHER, None, None, "T, D, greedy, batch size 1", 3.0, 2, 1.7
    )
    assert stored_costs.list_entries() == [load_costs("b"), load_costs("a")]


@pytest.mark.parametrize(
    "broken",
    [
        None,
        3,
        [],
        {},
        {"costs": {}},
        {"when": "x"},
        {"attempts": "x"},
        {"others": "y"},
        {"costs": asdict(KNOWN) | {"score": [[1, 0.0]]}},
        {"costs": asdict(KNOWN) | {"score": [[1, 10**400]]}},
        {"costs": asdict(KNOWN) | {"draft": 1}},
        {"costs": asdict(KNOWN) | {"change": None}},
    ],
)
def test_what_is_broken_is_measured_again(broken: object):
    store_costs("a", GOOD)
    whole = load_cached_values(COSTS_FILE)["a"]
    save_cached_value(
        COSTS_FILE, "a", whole | broken if isinstance(broken, dict) and broken else broken
    )
    assert load_costs("a") is None and stored_costs.list_entries() == []
    assert (
        load_or_measure("a", None, lambda: GOOD, remeasure=False) == KNOWN
        and load_costs("a") == GOOD
    )


@pytest.mark.parametrize(
    "first",
    [GOOD, POOR, StoredCosts(KNOWN, 9.0, None, when=0.0), StoredCosts(KNOWN, None, None, when=0.0)],
)
def test_costs_are_measured_once_however_busy_the_machine_was(
    first: StoredCosts, clock: list[float]
):
    assert load_or_measure("a", None, lambda: first, remeasure=True) == KNOWN
    clock[0] = FIRST_RETRY_SECONDS - 1
    assert load_or_measure("a", None, never, remeasure=True) == KNOWN
    assert (
        load_or_measure(None, None, lambda: first, remeasure=True) == KNOWN
    )  # and not, without a name


@pytest.mark.parametrize("first", [GOOD, POOR])
def test_costs_that_nothing_contradicts_are_never_measured_again(
    first: StoredCosts, clock: list[float]
):
    """Also those of a busy machine: a chat does not measure at each start."""
    store_costs("a", first)
    clock[0] = 1e9
    assert load_or_measure("a", None, never, remeasure=True) == KNOWN


def test_contradicted_costs_are_measured_again_by_a_later_start_and_ever_more_rarely(
    clock: list[float],
):
    store_costs("a", replace(POOR, off=2.0))
    attempts: list[float] = []

    def measure() -> StoredCosts:
        attempts.append(clock[0])
        return StoredCosts(OTHER, 1.2, 0.4, when=clock[0], off=2.0)  # no better

    for minute in range(0, 60 * 24 * 7, 10):  # a start every ten minutes, of a week
        clock[0] = 60.0 * minute
        load_or_measure("a", None, never, remeasure=False)
        load_or_measure("a", None, measure, remeasure=True)
    assert len(attempts) == 5 and attempts[0] == FIRST_RETRY_SECONDS
    clock[0] += MAX_RETRY_SECONDS
    load_or_measure("a", None, measure, remeasure=True)
    assert len(attempts) == 6


def test_costs_that_real_steps_contradict_are_measured_again(clock: list[float]):
    store_costs("a", GOOD)
    store_contradiction("a", KNOWN, MAX_COST_RATIO - 0.1)
    store_contradiction("a", OTHER, MAX_COST_RATIO + 1)  # what this process had are others by now
    store_contradiction("b", KNOWN, MAX_COST_RATIO + 1)
    assert load_costs("a") == GOOD and load_costs("b") is None
    store_contradiction("a", KNOWN, MAX_COST_RATIO + 1)
    assert load_costs("a") == StoredCosts(KNOWN, 1.1, 0.0, when=0.0, off=MAX_COST_RATIO + 1)
    clock[0] = FIRST_RETRY_SECONDS
    worse = StoredCosts(OTHER, 1.2, 0.01, when=FIRST_RETRY_SECONDS)
    assert load_or_measure("a", None, lambda: worse, remeasure=True) == OTHER
    again = load_costs("a")
    assert again == StoredCosts(OTHER, 1.2, 0.01, when=FIRST_RETRY_SECONDS, attempts=2)
    clock[0] = 1e9
    assert load_or_measure("a", None, never, remeasure=True) == OTHER


def test_costs_that_extend_others_follow_them(clock: list[float]):
    store_costs("many", GOOD)
    store_costs("one", StoredCosts(KNOWN, 1.1, 0.0, when=5.0))  # measured again meanwhile
    new = StoredCosts(OTHER, 1.1, 0.0, when=6.0)
    assert load_or_measure("many", "one", never, remeasure=False) == KNOWN
    assert load_or_measure("many", "one", lambda: new, remeasure=True) == OTHER
    assert load_or_measure("many", "one", never, remeasure=True) == OTHER


def steps(
    count: int, drafted: int, slow: float, *, rows: int = 1, predicted: bool = False
) -> list[StepRecord]:
    """Steps that take so many times what they should by KNOWN."""
    x = (0,) * drafted
    draft = 0.0 if predicted else 0.2 * drafted * slow
    score, verify = (2 + drafted / 4) * slow, 0.05 * drafted * slow
    each = StepRecord(drafted, x, 0, (1,), (), 0, draft, score, verify, rows, predicted=predicted)
    return [each] * count


def seen(*runs: list[StepRecord]) -> DriftMonitor:
    watch = DriftMonitor()
    for run in runs:
        watch.add_steps(run, KNOWN)
    return watch


@pytest.mark.parametrize(
    ("plain", "drafted", "off"),
    [
        (1.0, 1.0, 1.0),
        (3.0, 3.0, 1.0),  # the machine is busy now: nothing follows
        (1.0, 2.0, 2.0),
        (4.0, 1.0, 4.0),
        (0.5, 0.5, 2.0),  # it was busy then
    ],
)
def test_what_real_steps_say(plain: float, drafted: float, off: float):
    watch = seen(
        steps(MIN_MONITORED_STEPS + 1, 0, plain), steps(MIN_MONITORED_STEPS + 1, 4, drafted)
    )
    assert watch.off == pytest.approx(off)


def test_a_few_steps_say_nothing_nor_do_those_of_several_rows_or_of_another_size_than_the_last():
    changing = [
        step for pair in zip(steps(99, 0, 1.0), steps(99, 4, 5.0), strict=True) for step in pair
    ]
    assert seen(steps(MIN_MONITORED_STEPS, 0, 0.2)).off is None
    assert seen(steps(99, 4, 0.2, rows=2)).off is None
    assert seen(changing).off is None


def test_predicted_draft_tokens_cost_no_draft():
    assert seen(steps(MIN_MONITORED_STEPS + 1, 4, 1.0, predicted=True)).off == pytest.approx(1.0)


def test_the_newest_steps_count():
    assert seen(steps(999, 0, 0.1), steps(999, 0, 1.0)).off == pytest.approx(1.0)


def named(name: str, **changes) -> CausalModel:
    network = llama(32, **changes)
    network.name_or_path = name
    return CausalModel(network)


def test_what_speed_follows_from():
    """Shapes and precision; not the weights' values, nor where they came from."""
    one = make_identity(named("one", seed=1))
    assert one and one == make_identity(named("two", seed=2))
    assert one != make_identity(named("one", num_hidden_layers=1))
    half = named("one")
    half.model.bfloat16()
    assert one != make_identity(half)
    assert make_identity(LMDrafter(named("one"), 32)) == one
    json.loads(one)


def test_what_cannot_be_told_apart_has_no_key():
    unnamed, table = CausalModel(llama(32)), TableModel(lambda text: [0.5, 0.5], 2)
    assert (
        make_identity(unnamed)
        is make_identity(table)
        is make_identity(LMDrafter(unnamed, 32))
        is None
    )

    class Mine(LookupDrafter):
        pass

    assert make_identity(Mine()) is None and make_identity(LookupDrafter())
    assert make_key(unnamed, LookupDrafter()) is None
    assert make_key(named("one"), Mine()) is None


def test_a_key_for_every_pair_and_kind():
    target, lookup = named("one"), LookupDrafter()
    keys = {
        make_key(target, lookup, "greedy", 1),
        make_key(target, lookup, "greedy", 2),
        make_key(target, lookup, "sampled", 1),
        make_key(target, LMDrafter(target, 32), "greedy", 1),
        make_key(named("one", num_hidden_layers=1), lookup, "greedy", 1),
    }
    assert len(keys) == 5 and None not in keys
    assert make_key(target, lookup, "greedy", 1) in keys
