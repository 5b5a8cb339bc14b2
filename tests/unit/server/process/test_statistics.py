"""Rates follow from the steps, and are None before there are any."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from foretoken import Engine, Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import Ends
from foretoken.server.process.messages import GenerateRequest, Pace
from foretoken.server.process.statistics import SpecDecodeStats
from oracle import random_model
from table import TableModel

V = 12
OWN = {"gamma", "rule", "lenience"}  # of a request, beside its controls


def speculator() -> Speculator:
    target, draft = (TableModel(random_model(seed, V), V) for seed in (1, 2))
    return Speculator(target, LMDrafter(draft, V), None, Ends())


def test_nothing_is_made_up() -> None:
    report = SpecDecodeStats().rates()
    assert {report[name] for name in ("active", "alpha", "tokens_per_call")} == {None}
    assert report["acceptance_by_position"] == [] and report["measured_speedup"] is None
    assert report["measured_texts"] == {"speculative": 0, "plain": 0}


def test_rates_are_those_of_the_steps() -> None:
    spec, ledger = speculator(), SpecDecodeStats()
    done = []
    with Engine(spec) as engine:
        for seed, gamma in ((1, 3), (2, 3), (3, 0)):
            engine.add([1], gamma=gamma, seed=seed, temperature=1.0, max_new_tokens=30)
        while engine.running or engine.waiting:
            for event in engine.step():
                ledger.note(event.steps, plain=False)
                done += [] if event.completion is None else [event.completion]
    steps = [step for each in done for step in each.steps]
    report = ledger.rates()
    assert report["tokens_per_call"] == sum(len(s.kept) for s in steps) / len(steps)
    assert report["drafted"] == sum(s.drafted for s in steps)
    firsts = [s.accepted > 0 for s in steps if s.drafted]
    assert report["acceptance_by_position"][0] == sum(firsts) / len(firsts)
    assert 0 < report["alpha"] < 1
    assert sum(ledger.made.values()) == len(steps)


def test_alpha_is_the_drafts_and_not_the_predictions() -> None:
    spec, ledger = speculator(), SpecDecodeStats()
    with Engine(spec) as engine:
        engine.add([1], gamma=3, max_new_tokens=9, prediction=[3] * 20)
        while engine.running or engine.waiting:
            for event in engine.step():
                ledger.note([replace(s, predicted=True) for s in event.steps], plain=False)
    assert ledger.drafted > 0 and ledger.alpha is None


def test_texts_asked_for_plainly_say_nothing_of_draft_tokens_made() -> None:
    spec, ledger = speculator(), SpecDecodeStats()
    (text,) = spec.generate([1], gamma=0, max_new_tokens=5)
    ledger.note(text.steps, plain=True)
    assert ledger.steps == 5 and not any(ledger.made.values())


def compare(
    ledger: SpecDecodeStats, seconds: float, *, rows: int = 1, prompt: int = 10, **options: Any
) -> None:
    """A text of ten tokens behind its first step."""
    own = {name: options.pop(name) for name in OWN & options.keys()}
    controls: Any = {"max_new_tokens": 50, "temperature": 0.0} | options
    pace = Pace(10, seconds, prompt + controls["max_new_tokens"], rows)
    ledger.compare(GenerateRequest("", controls, **own), pace)


def compared(ledger: SpecDecodeStats) -> tuple[float | None, int, int]:
    report = ledger.rates()
    texts = report["measured_texts"]
    return report["measured_speedup"], texts["speculative"], texts["plain"]


def test_speeds_are_compared_among_as_many_rows() -> None:
    """Texts that ran alone, and among many: what many do to a text is no speculation's."""
    ledger = SpecDecodeStats()
    compare(ledger, 8.0, rows=16)
    compare(ledger, 2.0, gamma=0)
    assert compared(ledger) == (None, 0, 0)
    compare(ledger, 1.0)
    assert compared(ledger) == (pytest.approx(2.0), 1, 1)
    compare(ledger, 4.0, rows=15, gamma=0)  # not the same power of two as 16
    compare(ledger, 12.0, rows=20, gamma=0)
    assert compared(ledger) == (pytest.approx((2 + 12) / (1 + 8)), 2, 2)


@pytest.mark.parametrize(
    "other",
    [
        {"temperature": 0.7},
        {"repetition_penalty": 1.2},
        {"structured": {"regex": "a+"}},
        {"logit_bias": {1: 2.0}},
        {"max_new_tokens": 500},
        {"prompt": 1000},
    ],
)
def test_speeds_are_compared_at_the_same_settings(other: dict[str, Any]) -> None:
    """What else makes a token dear: a distribution, a control, a context."""
    ledger = SpecDecodeStats()
    compare(ledger, 1.0)
    compare(ledger, 9.0, gamma=0, **other)
    assert compared(ledger) == (None, 0, 0)
    compare(ledger, 3.0, **other)
    assert compared(ledger) == (pytest.approx(3.0), 1, 1)


def test_how_a_text_ends_is_no_setting_of_its_speed() -> None:
    ledger = SpecDecodeStats()
    compare(ledger, 1.0, stop_strings=["x"], temperature=1e-9)
    compare(ledger, 2.0, gamma=0, top_p=1.0, ignore_eos=True)
    assert compared(ledger) == (pytest.approx(2.0), 1, 1)


def test_other_acceptance_methods_are_left_out() -> None:
    ledger = SpecDecodeStats()
    compare(ledger, 1.0)
    compare(ledger, 2.0, gamma=0)
    for other in ({"rule": "coupled"}, {"rule": "speculative"}, {"lenience": 0.3}):
        compare(ledger, 0.1, **other)
    assert compared(ledger) == (pytest.approx(2.0), 1, 1)
    compare(ledger, 1.0, rule="block", lenience=1.0)
    assert compared(ledger) == (pytest.approx(2.0), 2, 1)
