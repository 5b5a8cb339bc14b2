"""Rates follow from the steps, and are None before there are any."""

from __future__ import annotations

from dataclasses import replace

from foretoken import Speculator
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens
from foretoken.server.process.statistics import SpecDecodeStats
from oracle import random_model
from table import TableModel

V = 12


def speculator() -> Speculator:
    target, draft = (TableModel(random_model(seed, V), V) for seed in (1, 2))
    return Speculator(target, LMDrafter(draft, V), None, EndTokens())


def test_rates_are_those_of_the_steps() -> None:
    """And None before there are any."""
    spec, ledger = speculator(), SpecDecodeStats()
    report = ledger.compute_rates()
    assert {report[name] for name in ("active", "alpha", "tokens_per_call")} == {None}
    assert report["acceptance_by_position"] == []
    steps = [
        step
        for seed, gamma in ((1, 3), (2, 3), (3, 0))
        for step in spec.generate([1], gamma=gamma, seed=seed, temperature=1.0, max_new_tokens=30)[
            0
        ].steps
    ]
    ledger.record(steps, plain=False)
    report = ledger.compute_rates()
    assert report["tokens_per_call"] == sum(len(s.new_tokens) for s in steps) / len(steps)
    assert report["drafted"] == sum(s.drafted for s in steps)
    firsts = [s.accepted > 0 for s in steps if s.drafted]
    assert report["acceptance_by_position"][0] == sum(firsts) / len(firsts)
    assert 0 < report["alpha"] < 1 and sum(ledger.steps_by_drafted.values()) == len(steps)


def test_predictions_and_plain_texts_say_nothing_of_the_draft() -> None:
    spec, ledger = speculator(), SpecDecodeStats()
    (text,) = spec.generate([1], gamma=3, max_new_tokens=9)
    ledger.record([replace(step, predicted=True) for step in text.steps], plain=False)
    assert ledger.drafted > 0 and ledger.alpha is None
    (text,) = spec.generate([1], gamma=0, max_new_tokens=5)
    plain = SpecDecodeStats()
    plain.record(text.steps, plain=True)
    assert plain.steps == 5 and not any(plain.steps_by_drafted.values())
