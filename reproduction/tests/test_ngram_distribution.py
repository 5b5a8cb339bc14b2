"""N-gram tables keep the target's distribution: alone, within mixtures and under controls.

A table's distributions are float32 and sum to 1 as far as float32 goes, so 1e-6 is rounding.
"""

from __future__ import annotations

import pytest

from exact.test_controls_distribution import CONTROLS, Automaton, case, lm, off
from exact.worlds import Case, Table, bias
from foretoken.drafters.cascade import CascadeDrafter
from foretoken.drafters.mixture import MixtureDrafter
from foretoken.sampling.acceptance_rules import EXACT_RULES
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from oracle import random_model
from reproduction.ngram import NGramDrafter
from reproduction.train_ngram import fit

V, GAMMA = 3, 2
TEXTS = [[0, 1, 2, 0, 0, 2, 1, 1, 0], [2, 2, 0, 1, 0]]
P, MIDDLE = random_model(1, V), random_model(2, V)
DRAFTERS = {
    "table": lambda: NGramDrafter(fit(TEXTS, V, 2)),
    "lm-then-table": lambda: MixtureDrafter([(lm(), 1), (NGramDrafter(fit(TEXTS, V, 2)), None)]),
}


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("order", [1, 2, 3])
def test_every_order(order, rule, monkeypatch):
    found = Case(
        lambda: Table(P, V), lambda: NGramDrafter(fit(TEXTS, V, order)), EXACT_RULES[rule], GAMMA
    )
    assert bias(found, P, monkeypatch) < 1e-6


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_in_a_cascade(rule, monkeypatch):
    table = fit(TEXTS, V, 2)
    drafter = lambda: CascadeDrafter(Table(MIDDLE, V), NGramDrafter(table), 2)  # noqa: E731
    found = Case(lambda: Table(P, V), drafter, EXACT_RULES[rule], GAMMA)
    assert bias(found, P, monkeypatch) < 1e-6


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_under_controls(kind, rule, monkeypatch):
    """Penalties and bans at once, and a mask."""
    assert off(case(DRAFTERS[kind], rule, CONTROLS["all"]), monkeypatch) < 1e-6
    masked = case(DRAFTERS[kind], rule, matcher=Automaton)
    assert off(masked, monkeypatch, automaton=True) < 1e-6


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", CONTROLS)
@pytest.mark.parametrize("kind", DRAFTERS)
def test_proof_every_control(kind, name, rule, monkeypatch):
    assert off(case(DRAFTERS[kind], rule, CONTROLS[name]), monkeypatch) < 1e-6


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("order", [1, 3])
def test_going_back(order, temperature):
    """What is taken back leaves no trace, whether draft tokens were made in between or not."""

    def draw() -> Draw:
        keys = [SequenceKey(0, 0), SequenceKey(0, 1)]
        return Draw(keys, [4, 5], [SamplingParams(temperature)] * 2)

    went, fresh = (NGramDrafter(fit(TEXTS, V, order)) for _ in range(2))
    for drafter in went, fresh:
        drafter.start([0, 1], [[0], [1, 0, 2]], None)
    went.propose([2, 3], draw())
    went.commit([[1, 2, 2, 0], [0, 0]])
    went.propose([3, 0], draw())
    went.rewind([2, 1])
    went.commit([[1], [1]])
    fresh.commit([[1, 2, 1], [0, 1]])
    one, other = (drafter.propose([3, 2], draw()) for drafter in (went, fresh))
    assert one.tokens.equal(other.tokens) and one.lengths.equal(other.lengths)
    assert (one.q is None) == (other.q is None)
    assert one.q is None or (other.q is not None and one.q[0].equal(other.q[0]))
