"""The comparison with plain decoding: what is measured and what is predicted from it."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.costing.costs import Costs
from foretoken.drafters.base import Draft, Draw
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
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
    assert comparison.gamma == 3 >= comparison.mean_gamma > 2 and comparison.silent < 0.1
    assert 0 < comparison.alpha < 1 and comparison.c > 0 and comparison.v > 0
    assert comparison.predicted > 0
    assert comparison.speedup == comparison.plain_seconds_per_token / comparison.seconds_per_token


def test_alpha_is_that_of_the_runs():
    options = {"gamma": 3, "temperature": 1.0, "max_new_tokens": 30}
    (completion,) = pair().generate([1, 2], **options)
    assert compare(pair(), [1, 2], **options).alpha == pytest.approx(completion.stats.alpha)


def test_without_draft_tokens_nothing_is_predicted():
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
    assert comparison.silent == 1


class Seldom(LMDrafter):
    """Guesses at every third step only, as look-up does where a text seldom repeats itself."""

    calls = 0

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        self.calls += 1
        return super().propose(gamma if self.calls % 3 == 0 else [0] * len(gamma), draw)


@pytest.mark.parametrize("gamma", [3, None])
def test_what_is_predicted_follows_from_the_draft_tokens_made(
    gamma: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where draft tokens cost nothing, a pass always the same and every draft token is kept, the
    prediction is the tokens of a step, however many steps had a draft token."""
    free = Costs(((0, 0.0), (16, 0.0)), ((1, 1.0), (17, 1.0)), ((1, 0.0),))
    monkeypatch.setattr("foretoken.lab.bench.compare.of", lambda steps: free)
    spec = Speculator(TableModel(P, V), Seldom(TableModel(P, V), V))
    spec.costing.measured["sampled", 1] = free
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 60}
    comparison = compare(spec, [1, 2], 1, gamma=gamma, **options)
    (completion,) = spec.generate([1, 2], gamma=gamma, **options)
    assert comparison.alpha == pytest.approx(1.0) and 0.6 < comparison.silent < 0.8
    tokens_per_step = 1 + comparison.mean_gamma
    assert comparison.predicted == pytest.approx(tokens_per_step)
    assert comparison.paper == pytest.approx(tokens_per_step)
    assert completion.stats.tokens_per_call == pytest.approx(tokens_per_step, rel=0.2)


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
