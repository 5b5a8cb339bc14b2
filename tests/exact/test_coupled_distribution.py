"""Coupled mode, enumerated: the noise is integrated out exactly, no chance is involved.

Two steps of the real engine leave the target's distribution as it is, whatever guesses, though a
position guessed again after a rejection meets its noise again; and draft tokens are kept as often
as the formula says. 1e-12 is rounding.
"""

from __future__ import annotations

from copy import copy

import numpy as np
import pytest
import torch
from torch import Tensor

from exact.drafters import Certain, FunctionDrafter
from exact.races import Race, V
from exact.worlds import Case, Table, World, bias
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import NoisePositions
from foretoken.sampling.keys import SequenceKey
from foretoken.theory import match_probability
from oracle import random_model

P, Q = random_model(1, V, zeros=0.15), random_model(2, V, zeros=0.15)
SAMPLED = SamplingParams(temperature=1.0)
DRAFTERS = {
    "lm": lambda: LMDrafter(Table(Q, V), V),
    "lm-is-target": lambda: LMDrafter(Table(P, V), V),
    "uniform": lambda: UniformDrafter(V),
    "certain": lambda: Certain(Q),
    "lookup": lambda: LookupDrafter(),
    "stops": lambda: FunctionDrafter(Q, after=lambda distribution, x: distribution[x] < 0.5),
}


def case(kind: str, gamma: int = 2, draw: type[Race] = Race, steps: int = 2) -> Case:
    drafter = DRAFTERS[kind]
    return Case(lambda: Table(P, V), drafter, "coupled", gamma, steps=steps, draw=draw)


@pytest.mark.daily("lm", "lookup")
@pytest.mark.parametrize("kind", DRAFTERS)
def test_two_steps_leave_the_distribution_as_it_is(kind, monkeypatch):
    assert bias(case(kind), P, monkeypatch) < 1e-12


def test_three_steps_meet_the_same_noise_three_times(monkeypatch):
    assert bias(case("lm", gamma=1, steps=3), P, monkeypatch) < 1e-12


def pairs(draw: type[Race], p: np.ndarray, q: np.ndarray) -> dict[tuple[int, int], float]:
    """The distribution of draft token and target's token at one position."""
    distribution: dict[tuple[int, int], float] = {}
    wave = [World({})]
    while wave:
        kind = type("ThisWave", (draw,), {"wave": wave})
        each = kind([SequenceKey(w, 0) for w in range(len(wave))], [1] * len(wave), SAMPLED)
        draft_tokens = each(torch.tensor(np.tile(q, (len(wave), 1))), 0).tolist()
        own = each.find_winners(torch.tensor(np.tile(p, (len(wave), 1, 1))))[:, 0].tolist()
        for world, *pair in zip(wave, draft_tokens, own, strict=True):
            distribution[tuple(pair)] = distribution.get(tuple(pair), 0.0) + world.weight
        wave = [World(path) for world in wave for path in world.others]
    return distribution


@pytest.mark.parametrize("text", [(0,), (1,), (2, 0), (0, 1), (1, 1, 2)])
def test_draft_token_and_token_have_their_distributions_and_match_as_the_formula_says(text):
    p, q = P(text), Q(text)
    distribution = np.zeros((V, V))
    for (x, y), weight in pairs(Race, p, q).items():
        distribution[x, y] = weight
    assert np.abs(distribution.sum(1) - q).max() < 1e-12
    assert np.abs(distribution.sum(0) - p).max() < 1e-12
    assert abs(np.trace(distribution) - match_probability(p, q)) < 1e-12
    for x in np.flatnonzero(p * q):
        assert abs(distribution[x, x] - 1 / np.maximum(p / p[x], q / q[x]).sum()) < 1e-12


class ByOffset(Race):
    """The noise belongs to the place in the block: the next step meets it at other positions."""

    def _noise_positions(self, offset: int) -> NoisePositions:
        places = zip(self.keys, self.offsets, strict=True)
        return tuple((key, first + offset) for key, first in places)


class Anew(Race):
    """The target draws once more, by other noise, where its token is not the draft token."""

    def __init__(self, *names) -> None:
        super().__init__(*names)
        self.guesses: dict[int, Tensor] = {}

    def __call__(self, distribution: Tensor, i: int, cdf: Tensor | None = None) -> Tensor:
        self.guesses[i] = super().__call__(distribution, i, cdf)
        return self.guesses[i]

    def find_winners(self, distributions: Tensor, first: int = 0) -> Tensor:
        own, other = super().find_winners(distributions, first), copy(self)
        other.lengths = [length + 100 for length in self.lengths]
        again = Race.find_winners(other, distributions, first)
        for i in range(own.shape[1]):
            draft_token = self.guesses.get(first + i, own[:, i])
            own[:, i] = own[:, i].where(own[:, i] == draft_token, again[:, i])
        return own


@pytest.mark.parametrize(("wrong", "steps"), [(ByOffset, 2), (Anew, 1)])
def test_noise_that_is_drawn_otherwise_is_seen(wrong, steps, monkeypatch):
    assert bias(case("lm", gamma=1, draw=wrong, steps=steps), P, monkeypatch) > 1e-2
