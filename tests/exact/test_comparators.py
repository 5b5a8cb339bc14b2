"""The comparators keep the target's distribution too: two steps, enumerated as the rules are.

No chance is involved: 1e-12 is rounding.
"""

from __future__ import annotations

import pytest

from exact.drafters import Certain, FunctionDrafter
from exact.worlds import Case, Table, bias
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.sampling.acceptance_rules import Outcome
from foretoken.sampling.comparators import COMPARATORS, match, rejection
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.lenience import make_lenient
from oracle import random_model

V, GAMMA = 3, 2
P, Q = random_model(1, V, zeros=0.15), random_model(2, V)
DRAFTERS = {
    "lm": lambda: LMDrafter(Table(Q, V), V),
    "lm-is-target": lambda: LMDrafter(Table(P, V), V),
    "lm-cannot-guess-all": lambda: LMDrafter(Table(random_model(3, V, zeros=0.4), V), V),
    "certain": lambda: Certain(Q),
    "uniform": lambda: UniformDrafter(V),
    "stops": lambda: FunctionDrafter(Q, after=lambda distribution, x: distribution[x] < 0.5),
}
OFTEN = ("lm", "lm-cannot-guess-all", "certain", "stops")


def case(rule, kind="lm", params=None) -> Case:
    params = params or SamplingParams(temperature=1.0)
    return Case(lambda: Table(P, V), DRAFTERS[kind], rule, GAMMA, params)


@pytest.mark.parametrize(
    "kind",
    [k if k in OFTEN else pytest.param(k, marks=pytest.mark.prove) for k in DRAFTERS],
)
@pytest.mark.parametrize("rule", COMPARATORS)
def test_two_steps_leave_the_distribution_as_it_is(rule, kind, monkeypatch):
    assert bias(case(COMPARATORS[rule], kind), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", COMPARATORS)
def test_the_distribution_is_the_standardized_one(rule, monkeypatch):
    params = SamplingParams(temperature=0.7, top_k=2)
    assert bias(case(COMPARATORS[rule], "lm", params), P, monkeypatch) < 1e-12


def with_q(rule):
    """Its acceptances, and Algorithm 1's residual."""

    def wrong(p, q, x, lengths):
        o = rule(p, q, x, lengths)
        return Outcome(o.survival, p, q, x, lengths, o.scale)

    return wrong


@pytest.mark.parametrize("rule", [with_q(match), with_q(rejection), make_lenient(match, 0.3)])
def test_what_is_not_exact_is_seen(rule, monkeypatch):
    assert bias(case(rule), P, monkeypatch) > 1e-3
