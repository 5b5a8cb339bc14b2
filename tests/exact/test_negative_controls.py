"""Mistakes that other systems have shipped, each planted here: the enumeration must see them.

A proof that cannot fail proves nothing. Each control has its honest twin, which passes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from exact.drafters import Dropper, FunctionDrafter, GreedyClaimsDistribution, RoundedClaim
from exact.worlds import Case, Table, WorldDraw, bias, distribution_of, standardized
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, Outcome, Rule, block, speculative
from foretoken.sampling.distributions import sample
from foretoken.sampling.keys import Purpose, SequenceKey
from oracle import extend, joint, random_model, tv

V, GAMMA = 3, 2
P, Q = random_model(1, V), random_model(2, V)
VISIBLE = 1e-3
KEY = SequenceKey(0, 0)


def case(drafter=lambda: FunctionDrafter(Q), rule: Rule = speculative, **changes) -> Case:
    return Case(lambda: Table(P, V), drafter, rule, GAMMA, **changes)


class WithoutResidual(Outcome):
    """After a rejection the next token comes from p, as if nothing had been tried."""

    def compute_next_distribution(self, n: Tensor) -> Tensor:
        return self.p[torch.arange(len(n)), n]


class FromNextRow(Outcome):
    """The replacement is taken from the row below."""

    def compute_next_distribution(self, n: Tensor) -> Tensor:
        return Outcome.compute_next_distribution(self, n).roll(1, 0)


class OverwrittenTarget(Outcome):
    """p is overwritten by the first residual, and then read again as p."""

    def compute_next_distribution(self, n: Tensor) -> Tensor:
        residual = Outcome.compute_next_distribution(self, n)
        self.p.copy_(residual[:, None].expand_as(self.p))
        return Outcome.compute_next_distribution(self, n)


def with_outcome(kind: type[Outcome], rule: Rule) -> Rule:
    def wrong(p, q, x, lengths):
        o = rule(p, q, x, lengths)
        return kind(o.survival, o.p, o.q, o.x, o.lengths, o.scale)

    return wrong


def greedy_at_any_temperature(p, q, x, lengths):
    """Keeps a draft token exactly where it is the target's likeliest token."""
    o = speculative(p, q, x, lengths)
    best = p[:, : x.shape[1]].argmax(-1) == x
    return replace(o, survival=best.double().where(o.survival >= 0, 0.0).cumprod(1))


def next_draft_token_decides(p, q, x, lengths):
    """Token-level acceptance that looks at the distribution one position too early."""
    early = p.roll(1, 1)
    return replace(speculative(early, q, x, lengths), p=p)


@pytest.mark.parametrize("rule", EXACT_RULES.values(), ids=EXACT_RULES)
def test_the_honest_twin(rule, monkeypatch):
    assert bias(case(rule=rule), P, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES.values(), ids=EXACT_RULES)
@pytest.mark.parametrize("kind", [WithoutResidual, OverwrittenTarget])
def test_a_wrong_replacement(kind, rule, monkeypatch):
    assert bias(case(rule=with_outcome(kind, rule)), P, monkeypatch) > VISIBLE


@pytest.mark.parametrize("rule", [greedy_at_any_temperature, next_draft_token_decides])
def test_a_wrong_rule(rule, monkeypatch):
    assert bias(case(rule=rule), P, monkeypatch) > VISIBLE


@pytest.mark.parametrize("rule", EXACT_RULES.values(), ids=EXACT_RULES)
@pytest.mark.parametrize("liar", [GreedyClaimsDistribution, RoundedClaim, Dropper])
def test_a_drafter_that_lies(liar, rule, monkeypatch):
    assert bias(case(lambda: liar(Q), rule), P, monkeypatch) > VISIBLE


def first_steps(kind: type[Outcome], monkeypatch) -> float:
    """The bias of the first of two rows after one step, alone in their batch."""
    rows = (Request([0], 100, KEY), Request([1, 0, 1], 100, KEY))
    p, q = random_model(1, 2), random_model(2, 2)
    distribution: dict = {}
    wrong = with_outcome(kind, speculative)
    two = Case(
        lambda: Table(p, 2),
        lambda: FunctionDrafter(q),
        wrong,
        1,
        rows=rows,
        steps=1,
        together=False,
    )
    for texts, weight in distribution_of(two, monkeypatch).items():
        distribution[texts[0]] = distribution.get(texts[0], 0.0) + weight
    own = standardized(p, two.params, (0,))
    return tv(extend(distribution, own, 2), joint(own, 2))


def test_a_replacement_from_another_row(monkeypatch):
    assert first_steps(Outcome, monkeypatch) < 1e-12
    assert first_steps(FromNextRow, monkeypatch) > VISIBLE


def on_a_grid(seed: int, V: int, cells: int):
    """A model whose distributions are multiples of 1 / cells: as many uniforms integrate it
    exactly."""
    smooth = random_model(seed, V, sharpness=2.0)

    def model(text):
        cuts = np.round(np.cumsum(smooth(text)) * cells) / cells
        return np.diff(np.concatenate([[0.0], cuts]))

    return model


class GridDraw(WorldDraw):
    """Names its draws as it likes; two draws of one name share their uniform, one of CELLS."""

    CELLS = 8

    def shared(self, distributions: Tensor, names: list[tuple]) -> Tensor:
        u = []
        for key, name in zip(self.keys, names, strict=True):
            cell = self.wave[key.seed].take((key.number, *name), [1 / self.CELLS] * self.CELLS)
            u.append((cell + 0.5) / self.CELLS)
        return sample(distributions, torch.tensor(u, dtype=torch.float64))


class ByCommittedLength(GridDraw):
    """What the package does, on the grid."""

    def __call__(self, distribution: Tensor, i: int) -> Tensor:
        return self.shared(distribution, [(length, i, Purpose.DRAFT) for length in self.lengths])


class ByPosition(GridDraw):
    """A position that is drafted again after a rejection meets its old noise."""

    def __call__(self, distribution: Tensor, i: int) -> Tensor:
        return self.shared(
            distribution, [(length + i, 0, Purpose.DRAFT) for length in self.lengths]
        )


class OneStream(ByCommittedLength):
    """The next token is drawn with the noise of the first draft token."""

    def draw_next_token(self, distribution: Tensor) -> Tensor:
        return self.shared(distribution, [(length, 0, Purpose.DRAFT) for length in self.lengths])


def grid_bias(draw: type[GridDraw], gamma: int, steps: int, monkeypatch) -> float:
    p, q = on_a_grid(5, 2, draw.CELLS), on_a_grid(6, 2, draw.CELLS)
    return bias(
        Case(lambda: Table(p, 2), lambda: FunctionDrafter(q), block, gamma, steps=steps, draw=draw),
        p,
        monkeypatch,
    )


def test_noise_keyed_by_position_alone(monkeypatch):
    """Architecture: a number is named by the committed length and the offset, never their sum."""
    monkeypatch.setattr(GridDraw, "CELLS", 4)
    assert grid_bias(ByCommittedLength, 2, 2, monkeypatch) < 1e-12
    assert grid_bias(ByPosition, 2, 2, monkeypatch) > VISIBLE


def test_one_stream_for_the_draft_token_and_the_next_token(monkeypatch):
    """The residual is no multiple of a cell: the shared noise is integrated to 1 / CELLS only."""
    monkeypatch.setattr(GridDraw, "CELLS", 64)
    assert grid_bias(ByCommittedLength, 1, 1, monkeypatch) < 1e-12
    assert grid_bias(OneStream, 1, 1, monkeypatch) > 0.05
