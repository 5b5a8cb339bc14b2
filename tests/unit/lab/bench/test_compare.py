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
    comparison = compare(pair(), [1, 2], gamma=3, temperature=1.0, max_new_tokens=30)
    assert comparison.gamma == comparison.formula_gamma == 3 >= comparison.mean_gamma > 2
    assert 0 < comparison.alpha < 1 and comparison.c > 0 and comparison.v > 0
    assert comparison.paper == theory.walltime_factor(comparison.alpha, 3, comparison.c)
    assert comparison.predicted > 0
    assert comparison.speedup == comparison.plain_seconds_per_token / comparison.seconds_per_token


def test_alpha_is_that_of_the_runs():
    options = {"gamma": 3, "temperature": 1.0, "max_new_tokens": 30}
    (completion,) = pair().generate([1, 2], **options)
    assert compare(pair(), [1, 2], **options).alpha == pytest.approx(completion.stats.alpha)


def test_without_guesses_nothing_is_predicted():
    spec = Speculator(TableModel(P, V), NoDrafter())
    comparison = compare(spec, [1, 2], max_new_tokens=5)
    assert comparison.gamma is None and comparison.mean_gamma == 0 and comparison.speedup > 0
    assert (
        comparison.alpha,
        comparison.c,
        comparison.v,
        comparison.paper,
        comparison.predicted,
    ) == (None,) * 5
    assert comparison.formula_gamma is None


def test_automatic_gamma_is_told_what_the_best_fixed_one_should_gain():
    spec = pair()
    spec._costs["sampled", 1] = Costs(((0, 0.0), (16, 0.1)), ((1, 1.0), (17, 1.2)), ((1, 0.0),))
    comparison = compare(spec, [1, 2], temperature=1.0, max_new_tokens=30)
    assert comparison.gamma is None and 0 <= comparison.formula_gamma <= MAX_GAMMA
    assert comparison.predicted is None or comparison.predicted >= 1


def test_one_token():
    comparison = compare(pair(), [1, 2], gamma=3, max_new_tokens=1)
    assert comparison.mean_gamma == 0 and comparison.alpha is None and comparison.speedup > 0


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
