"""Rates follow from the steps, and are None before there are any."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken import Engine, Speculator
from foretoken.costing.costs import Costs
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import Ends
from foretoken.models.table import TableModel
from foretoken.records import Begun
from foretoken.request import Steady
from foretoken.server.process.messages import GenerateRequest
from foretoken.server.process.statistics import RequestProfile, SpecDecodeStats
from oracle import random_model

V = 12
OWN = {"gamma", "rule", "lenience", "begun"}  # of a request, beside its controls
COSTS = Costs(((0, 0.0), (4, 0.004)), ((1, 0.01), (5, 0.012)), ((1, 0.0), (5, 0.0)))


def speculator() -> Speculator:
    target, draft = (TableModel(random_model(seed, V), V) for seed in (1, 2))
    return Speculator(target, LMDrafter(draft, V), None, Ends())


def test_nothing_is_made_up() -> None:
    report = SpecDecodeStats().report(speculator())
    unknown = ("alpha", "c", "v", "predicted_speedup", "measured_speedup", "tokens_per_call")
    assert {report[name] for name in unknown} == {None} and report["acceptance_by_position"] == []
    assert report["measured_texts"] == {"speculative": 0, "plain": 0}


def test_rates_are_those_of_the_steps() -> None:
    spec, ledger = speculator(), SpecDecodeStats()
    done = []
    with Engine(spec) as engine:
        for seed, gamma in ((1, 3), (2, 3), (3, 0)):
            engine.add([1], gamma=gamma, seed=seed, temperature=1.0, max_new_tokens=30)
        while engine.running or engine.waiting:
            for event in engine.step():
                ledger.note(event, asked())
                done += [] if event.completion is None else [event.completion]
    steps = [step for each in done for step in each.steps]
    spec.costing.measured["sampled", 1] = COSTS
    report = ledger.report(spec)
    assert report["tokens_per_call"] == sum(len(s.kept) for s in steps) / len(steps)
    assert report["drafted"] == sum(s.drafted for s in steps)
    firsts = [s.accepted > 0 for s in steps if s.drafted]
    assert report["acceptance_by_position"][0] == sum(firsts) / len(firsts)
    assert 0 < report["alpha"] < 1 and report["c"] == pytest.approx(0.1)
    assert report["predicted_speedup"] > 0


def text(tokens: int, seconds: float, *, rows: int = 1, drafted: int = 0) -> Any:
    """The event at the end of a text of two steps or more, of which the first gave one token."""
    step = SimpleNamespace(
        kept=[1] * tokens, drafted=drafted, accepted=0, predicted=False, overlaps=[], rows=rows
    )
    done = SimpleNamespace(steps=[step, step], steady=Steady(tokens, seconds, [step]))
    return SimpleNamespace(steps=[step], completion=done)


def asked(prompt: int = 10, **options: Any) -> RequestProfile:
    own = {name: options.pop(name) for name in OWN & options.keys()}
    controls: Any = {"max_new_tokens": 50, "temperature": 0.0} | options
    request = GenerateRequest("", controls, **own)
    return RequestProfile.of(request, prompt + controls["max_new_tokens"])


def compared(ledger: SpecDecodeStats) -> tuple[float | None, int, int]:
    report = ledger.rates()
    texts = report["measured_texts"]
    return report["measured_speedup"], texts["speculative"], texts["plain"]


def test_speeds_are_compared_among_as_many_rows() -> None:
    """Texts that ran alone, and among many: what many do to a text is no speculation's."""
    ledger = SpecDecodeStats()
    ledger.note(text(10, 8.0, rows=16, drafted=3), asked())
    ledger.note(text(10, 2.0), asked(gamma=0))
    assert compared(ledger) == (None, 0, 0)
    ledger.note(text(10, 1.0, drafted=3), asked())
    assert compared(ledger) == (pytest.approx(2.0), 1, 1)
    ledger.note(text(10, 4.0, rows=15), asked(gamma=0))  # not the same power of two as 16
    ledger.note(text(10, 12.0, rows=20), asked(gamma=0))
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
    ledger.note(text(10, 1.0, drafted=3), asked())
    ledger.note(text(10, 9.0), asked(gamma=0, **other))
    assert compared(ledger) == (None, 0, 0)
    ledger.note(text(10, 3.0, drafted=3), asked(**other))
    assert compared(ledger) == (pytest.approx(3.0), 1, 1)


def test_how_a_text_ends_is_no_setting_of_its_speed() -> None:
    ledger = SpecDecodeStats()
    ledger.note(text(10, 1.0, drafted=3), asked(stop_strings=["x"], temperature=1e-9))
    ledger.note(text(10, 2.0), asked(gamma=0, top_p=1.0, ignore_eos=True))
    assert compared(ledger) == (pytest.approx(2.0), 1, 1)


def test_a_text_without_draft_tokens_is_plain_only_where_that_was_asked_for() -> None:
    """Gamma may have been 0, or look-up have found nothing: its time is speculation's."""
    ledger = SpecDecodeStats()
    ledger.note(text(10, 1.0, drafted=3), asked())
    ledger.note(text(10, 3.0), asked())
    assert compared(ledger) == (None, 0, 0)
    ledger.note(text(10, 2.0), asked(gamma=0))
    assert compared(ledger) == (pytest.approx(1.0), 2, 1)


def test_times_that_are_not_of_one_text_alone_are_left_out() -> None:
    """Of a plain text that waited for others' drafts, of what another engine began, of a single
    step, which reads the prompt too, and of other acceptance methods."""
    ledger, beside = SpecDecodeStats(), asked(gamma=0)
    beside.mixed = True
    ledger.note(text(10, 9.0), beside)
    ledger.note(text(10, 9.0), asked(gamma=0, begun=Begun([])))
    single = text(10, 9.0)
    single.completion.steps = single.steps
    ledger.note(single, asked(gamma=0))
    ledger.note(text(10, 1.0, drafted=3), asked())
    assert compared(ledger) == (None, 0, 0)
    ledger.note(text(10, 2.0), asked(gamma=0))
    for other in ({"rule": "coupled"}, {"rule": "speculative"}, {"lenience": 0.3}):
        ledger.note(text(10, 0.1, drafted=3), asked(**other))
    assert compared(ledger) == (pytest.approx(2.0), 1, 1)
    ledger.note(text(10, 1.0, drafted=3), asked(rule="block", lenience=1.0))
    assert compared(ledger) == (pytest.approx(2.0), 2, 1)


def test_engines_compare_together() -> None:
    one, other = SpecDecodeStats(), SpecDecodeStats()
    one.note(text(10, 1.0, drafted=3), asked())
    other.note(text(10, 2.0), asked(gamma=0))
    one.add(other)
    assert compared(one) == (pytest.approx(2.0), 1, 1)


def test_alpha_is_the_drafts_and_not_the_predictions() -> None:
    spec, ledger = speculator(), SpecDecodeStats()
    with Engine(spec) as engine:
        engine.add([1], gamma=3, max_new_tokens=9, prediction=[3] * 20)
        while engine.running or engine.waiting:
            for event in engine.step():
                predicted = [replace(step, predicted=True) for step in event.steps]
                ledger.note(replace(event, steps=predicted), asked())
    assert ledger.drafted > 0 and ledger.alpha is None


def test_what_is_predicted_follows_from_the_draft_tokens_made() -> None:
    """Always kept, at every other step: (4 + 1) tokens in (3 c + v(4)) + 1 plain passes."""
    spec, ledger = speculator(), SpecDecodeStats()
    spec.costing.measured["sampled", 1] = COSTS
    for drafted in (3, 0) * 5:
        done = text(1, 1.0, drafted=drafted)
        done.steps[0].overlaps = [1.0] * drafted
        ledger.note(unfinished(done), asked())
    ledger.note(unfinished(text(1, 1.0)), asked(gamma=0))  # no wish to speculate
    expected = 5 / (3 * COSTS.c + COSTS.v(4) + 1)
    assert ledger.report(spec)["predicted_speedup"] == pytest.approx(expected)


def unfinished(event: Any) -> Any:
    """The same, of a text that goes on."""
    event.completion = None
    return event
