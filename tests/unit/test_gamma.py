"""Gamma from measured costs: alpha, c and v as the step records have them."""

from __future__ import annotations

import pytest
import torch

from foretoken.gamma import MAX_GAMMA, Costs, costs
from foretoken.request import StepRecord
from foretoken.theory import optimal_gamma
from foretoken.verify import overlap


def record(drafted: int, accepted: int = 0, overlaps=(), draft=0.0, score=1.0, verify=0.0):
    return StepRecord(
        gamma=drafted,
        guesses=tuple(range(drafted)),
        accepted=accepted,
        kept=(1,) * (accepted + 1),
        overlaps=tuple(overlaps),
        draft_calls=drafted,
        draft_seconds=draft,
        score_seconds=score,
        verify_seconds=verify,
        rows=1,
    )


def test_costs_are_medians_and_alpha_a_mean():
    plain = [record(0, score=s) for s in (9.0, 1.0, 2.0, 2.0, 1.0)]
    steps = [
        record(4, 1, [0.5, 0.7], draft=0.8, score=3.0, verify=0.2),
        record(4, 4, [0.9] * 4, draft=1.6, score=99.0, verify=0.2),
        record(4, 0, [0.0], draft=0.4, score=3.0, verify=0.2),
        record(2, 2, [1.0, 1.0], draft=50.0, score=50.0),  # trimmed near the end: not timed
        record(0, score=70.0),
    ]
    found = costs(plain, steps)
    assert found.alpha == pytest.approx((0.5 + 0.7 + 4 * 0.9 + 0 + 2) / 9)
    assert found.c == pytest.approx(0.8 / 4 / 2)
    assert found.v(5) == pytest.approx(3.2 / 2)
    assert found.v(1) == 1 and found.v(3) == pytest.approx((1 + 3.2 / 2) / 2)


def test_v_never_falls():
    assert costs([record(0, score=2.0)], [record(2, 1, [0.5, 0.5], score=1.0)]).v(9) == 1


def test_nothing_drafted_is_nothing_known():
    assert costs([record(0)], [record(0)]) is None
    assert costs([], [record(2, 0, [0.5])]) is None
    assert costs([record(0)], []) is None


def test_alpha_is_never_above_1_whatever_the_rounding():
    """float32 laws may sum to a little more, and then no formula would take their overlap."""
    torch.manual_seed(0)
    p = torch.randn(200, 2, 64).softmax(-1)
    assert (p.double().sum(-1) > 1).any()
    beta = overlap(p, p[:, :1], torch.zeros(200, 1).long())
    assert beta.max() == 1 and beta.min() > 0.999
    assert costs([record(0)], [record(1, 1, [beta.max().item()])]).gamma == MAX_GAMMA


def test_gamma_is_the_theorems_optimum():
    assert Costs(0.8, 0.02, 0.0).gamma == optimal_gamma(0.8, 0.02, max_gamma=MAX_GAMMA) == 11
    assert Costs(0.8, 0.02, 0.1).gamma < 11  # a verification that costs more
    assert Costs(0.1, 0.2, 0.0).gamma == 0
    assert Costs(0.0, 0.0, 0.1).gamma == 0
    assert Costs(1.0, 0.0, 0.0).gamma == MAX_GAMMA
