"""What a certificate is said to take: its parts' times, by how many there are."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError
from foretoken.lab.certificate import certify as duration
from foretoken.lab.certificate.certify import CONTROLS, GREEDY, CertificatePlan, expected
from foretoken.models.table import TableModel
from foretoken.options import Prompt
from foretoken.sampling.params import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model

V = 6
PLAN = CertificatePlan(gamma=1, texts=160, greedy=10, distributions=(SamplingParams(1.0),))
PROMPTS: list[Prompt] = [[1, 2], [3]]


def pair() -> Speculator:
    return Speculator(
        TableModel(random_model(1, V), V), LMDrafter(TableModel(random_model(2, V), V), V)
    )


def timed(
    monkeypatch: pytest.MonkeyPatch,
    drafted: float,
    plain: float,
    greedy: float,
    plan: CertificatePlan,
) -> float:
    """By a clock for which the parts take so long, of 8 texts a prompt or 4 greedy tokens."""
    clock = accumulate([0.0, drafted, 0.0, plain, 0.0, greedy])
    monkeypatch.setattr(duration, "perf_counter", lambda: next(clock))
    return expected(pair(), PROMPTS, plan)


def test_every_part_counts_as_often_as_there_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, 1, 0, 0, PLAN) == pytest.approx(20 * (1 + CONTROLS))
    assert timed(monkeypatch, 0, 1, 0, PLAN) == pytest.approx(20 * 2)
    assert timed(monkeypatch, 0, 0, 4, PLAN) == pytest.approx(GREEDY * 2 * 10)
    distributions = replace(PLAN, distributions=PLAN.distributions * 2)
    assert timed(monkeypatch, 1, 1, 0, distributions) == pytest.approx(20 * (2 + CONTROLS + 4))
    thorough = replace(PLAN, texts=8 * 160)
    assert timed(monkeypatch, 1, 1, 0, thorough) == pytest.approx(160 * (3 + CONTROLS))


def test_what_cannot_be_certified_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="draft is none"):
        expected(replace(pair(), drafter=NoDrafter()), PROMPTS, PLAN)
    with pytest.raises(InputError, match="there is no prompt"):
        expected(pair(), [], PLAN)
