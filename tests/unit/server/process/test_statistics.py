"""Rates follow from the steps, and are None before there are any."""

from __future__ import annotations

from dataclasses import replace

from foretoken import Engine, Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import Ends
from foretoken.server.process.statistics import SpecDecodeStats
from oracle import random_model
from table import TableModel

V = 12


def speculator() -> Speculator:
    target, draft = (TableModel(random_model(seed, V), V) for seed in (1, 2))
    return Speculator(target, LMDrafter(draft, V), None, Ends())


def test_nothing_is_made_up() -> None:
    report = SpecDecodeStats().rates()
    assert {report[name] for name in ("active", "alpha", "tokens_per_call")} == {None}
    assert report["acceptance_by_position"] == []


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
