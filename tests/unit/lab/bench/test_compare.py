"""The comparison with plain decoding: what is measured and what is predicted from it."""

from __future__ import annotations

import pytest

from foretoken import theory
from foretoken.costs import Costs
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.gamma import MAX_GAMMA
from foretoken.lab.bench.compare import compare
from foretoken.models.table import TableModel
from foretoken.speculator import Speculator
from oracle import random_model

V = 6
P, Q = random_model(1, V), random_model(2, V)


def pair() -> Speculator:
    return Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V))


def test_a_comparison():
    found = compare(pair(), [1, 2], gamma=3, temperature=1.0, max_new_tokens=30)
    assert found.gamma == found.formula_gamma == 3 >= found.mean_gamma > 2
    assert 0 < found.alpha < 1 and found.c > 0 and found.v > 0
    assert found.paper == theory.walltime_factor(found.alpha, 3, found.c)
    assert found.predicted > 0
    assert found.speedup == found.plain_seconds_per_token / found.seconds_per_token


def test_alpha_is_that_of_the_runs():
    options = {"gamma": 3, "temperature": 1.0, "max_new_tokens": 30}
    (done,) = pair().generate([1, 2], **options)
    assert compare(pair(), [1, 2], **options).alpha == pytest.approx(done.stats.alpha)


def test_without_guesses_nothing_is_predicted():
    spec = Speculator(TableModel(P, V), NoDrafter())
    found = compare(spec, [1, 2], max_new_tokens=5)
    assert found.gamma is None and found.mean_gamma == 0 and found.speedup > 0
    assert (found.alpha, found.c, found.v, found.paper, found.predicted) == (None,) * 5
    assert found.formula_gamma is None


def test_automatic_gamma_is_told_what_the_best_fixed_one_should_gain():
    spec = pair()
    spec._costs["sampled", 1] = Costs(((0, 0.0), (16, 0.1)), ((1, 1.0), (17, 1.2)), ((1, 0.0),))
    found = compare(spec, [1, 2], temperature=1.0, max_new_tokens=30)
    assert found.gamma is None and 0 <= found.formula_gamma <= MAX_GAMMA
    assert found.predicted is None or found.predicted >= 1


def test_one_token():
    found = compare(pair(), [1, 2], gamma=3, max_new_tokens=1)
    assert found.mean_gamma == 0 and found.alpha is None and found.speedup > 0


@pytest.mark.parametrize("after", [2, 8, 14])
def test_an_interruption_is_none_of_its_results(after):
    class Impatient(TableModel):
        left = after

        def score(self, blocks, need):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().score(blocks, need)

    spec = Speculator(Impatient(P, V), LMDrafter(TableModel(Q, V), V))
    with pytest.raises(KeyboardInterrupt):
        compare(spec, [1, 2], gamma=2, max_new_tokens=6)
