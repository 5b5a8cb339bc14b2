"""A prediction is a draft token like any other: whatever it says, two steps leave the target's
distribution as it is, also in rows beside such as have none. Chance is integrated out; 1e-12 is
rounding."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import pytest
import torch

from exact.drafters import Certain, FunctionDrafter
from exact.worlds import Case, Table, bias, distribution_of
from foretoken.drafters.base import Draft
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.mixture import KnownTokensDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine import batch
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import random_model

pytestmark = pytest.mark.daily

V, GAMMA = 3, 2
P, Q = random_model(1, V), random_model(2, V)
VISIBLE = 1e-3
PREDICTIONS = {
    "likely": (1, 2, 0, 1, 2),
    "one": (2,),
    "the-same": (1, 1, 1, 1, 1, 1),
    "all": tuple(token for pair in product(range(V), repeat=2) for token in pair),
}
DRAFTERS = {
    "none": NoDrafter,
    "lm": lambda: LMDrafter(Table(Q, V), V),
    "drawn": lambda: FunctionDrafter(Q),
    "certain": lambda: Certain(Q),
}


def row(prediction: tuple[int, ...] = (), **changes) -> Request:
    return Request([0], 100, SequenceKey(0, 0), prediction=prediction, **changes)


def case(drafter: str, rows: tuple[Request, ...], rule=speculative, **changes) -> Case:
    return Case(lambda: Table(P, V), DRAFTERS[drafter], rule, GAMMA, rows=rows, **changes)


@pytest.mark.parametrize("rule", EXACT_RULES.values(), ids=EXACT_RULES)
@pytest.mark.parametrize("drafter", DRAFTERS)
def test_two_steps_with_a_prediction(drafter, rule, monkeypatch):
    assert bias(case(drafter, (row((1, 2, 0, 1, 2)),), rule), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("prediction", PREDICTIONS.values(), ids=PREDICTIONS)
@pytest.mark.parametrize("temperature", [0.0, 0.5])
def test_any_prediction(prediction, temperature, monkeypatch):
    tried = case("lm", (row(prediction),), params=SamplingParams(temperature))
    assert bias(tried, P, monkeypatch) < 1e-12


@pytest.mark.parametrize("drafter", ["none", "lm"])
def test_a_row_beside_one_without(drafter, monkeypatch):
    """Their joint distribution is the product: neither knows the other's guesses."""
    distribution = distribution_of(case(drafter, (row((1, 2, 0)), row()), steps=1), monkeypatch)
    firsts: dict[tuple[int, int], float] = {}
    for (a, b), weight in distribution.items():
        firsts[a[0], b[0]] = firsts.get((a[0], b[0]), 0.0) + weight
    own = P((0,))
    assert any(len(a) > 1 for a, _ in distribution) and len(firsts) == V * V
    for (a, b), weight in firsts.items():
        assert weight == pytest.approx(float(own[a] * own[b]), abs=1e-12)


# --- a prediction that lies is seen ---


class ClaimsDistribution(KnownTokensDrafter):
    """Says of what it was given that it was drawn, all tokens being alike."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        draft = super().propose(gamma, draw)
        return replace(draft, q=torch.full((*draft.tokens.shape, V), 1 / V).double())


def test_a_lie_about_it_is_seen(monkeypatch):
    setting = case("none", (row((1, 2, 0, 1, 2)),))
    assert bias(setting, P, monkeypatch) < 1e-12
    monkeypatch.setattr(batch, "KnownTokensDrafter", ClaimsDistribution)
    assert bias(setting, P, monkeypatch) > VISIBLE
