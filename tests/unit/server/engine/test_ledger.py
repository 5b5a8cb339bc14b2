"""Rates follow from the steps, and are None before there are any."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import Engine, Speculator
from foretoken.costs import Costs
from foretoken.drafters.lm import LMDrafter
from foretoken.ends import Ends
from foretoken.models.table import TableModel
from foretoken.request import Steady
from foretoken.server.engine.ledger import Ledger
from oracle import random_model

V = 12
COSTS = Costs(((0, 0.0), (4, 0.004)), ((1, 0.01), (5, 0.012)), ((1, 0.0), (5, 0.0)))


def speculator() -> Speculator:
    target, draft = (TableModel(random_model(seed, V), V) for seed in (1, 2))
    return Speculator(target, LMDrafter(draft, V), None, Ends())


def test_nothing_is_made_up() -> None:
    report = Ledger().report(speculator())
    unknown = ("alpha", "c", "v", "predicted_speedup", "measured_speedup", "tokens_per_call")
    assert {report[name] for name in unknown} == {None} and report["acceptance_by_position"] == []


def test_rates_are_those_of_the_steps() -> None:
    spec, ledger = speculator(), Ledger()
    done = []
    with Engine(spec) as engine:
        for seed, gamma in ((1, 3), (2, 3), (3, 0)):
            engine.add([1], gamma=gamma, seed=seed, temperature=1.0, max_new_tokens=30)
        while engine.running or engine.waiting:
            for event in engine.step():
                ledger.note(event)
                done += [] if event.completion is None else [event.completion]
    steps = [step for each in done for step in each.steps]
    spec._costs["sampled", 1] = COSTS
    report = ledger.report(spec)
    assert report["tokens_per_call"] == sum(len(s.kept) for s in steps) / len(steps)
    assert report["drafted"] == sum(s.drafted for s in steps)
    firsts = [s.accepted > 0 for s in steps if s.drafted]
    assert report["acceptance_by_position"][0] == sum(firsts) / len(firsts)
    assert 0 < report["alpha"] < 1 and report["c"] == pytest.approx(0.1)
    assert report["predicted_speedup"] >= 1


def test_speeds_are_compared_among_as_many_rows() -> None:
    """Guessed texts that ran alone, and among many: what many do to a text is no speculation's."""
    spec, ledger = speculator(), Ledger()

    def text(rows: int, drafted: int, seconds: float) -> Any:
        step = SimpleNamespace(
            kept=[1] * 10, drafted=drafted, accepted=0, predicted=False, overlaps=[], rows=rows
        )
        done = SimpleNamespace(
            stats=SimpleNamespace(drafted=drafted), steady=Steady(10, seconds, [])
        )
        return SimpleNamespace(steps=[step], completion=done)

    ledger.note(text(16, 3, 8.0))
    ledger.note(text(1, 0, 2.0))
    assert ledger.report(spec)["measured_speedup"] is None
    ledger.note(text(1, 3, 1.0))
    assert ledger.report(spec)["measured_speedup"] == pytest.approx(2.0)
    ledger.note(text(15, 0, 4.0))  # 16 and 15 are not the same power of two
    ledger.note(text(20, 0, 12.0))
    assert ledger.report(spec)["measured_speedup"] == pytest.approx((2 + 12) / (1 + 8))


def test_alpha_is_the_drafts_and_not_the_predictions() -> None:
    spec, ledger = speculator(), Ledger()
    with Engine(spec) as engine:
        engine.add([1], gamma=3, max_new_tokens=9, prediction=[3] * 20)
        while engine.running or engine.waiting:
            for event in engine.step():
                predicted = [replace(step, predicted=True) for step in event.steps]
                ledger.note(replace(event, steps=predicted))
    assert ledger.drafted > 0 and ledger.alpha is None
