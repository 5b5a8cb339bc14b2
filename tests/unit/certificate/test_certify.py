"""A certificate's controls, which must fail, and how long it takes."""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate

import numpy as np
import pytest
import torch

from exact.drafters import Certain, FunctionDrafter
from foretoken.certificate import certify as duration
from foretoken.certificate.certify import (
    CONTROLS,
    GREEDY,
    CertificatePlan,
    Likeliest,
    OffByOne,
    expected,
    next_row,
)
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError
from foretoken.options import Prompt
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verify import block
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel

V = 5
P, Q = random_model(1, V), random_model(2, V)


def test_a_replacement_comes_from_one_position_too_far():
    p = torch.tensor(np.array([P(text) for text in ((0,), (0, 1), (0, 1, 2))]))[None]
    q = torch.tensor(np.array([Q(text) for text in ((0,), (0, 1))]))[None]
    x, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    honest, broken = block(p, q, x, lengths), next_row(block)(p, q, x, lengths)
    torch.testing.assert_close(broken.survival, honest.survival)
    for n, row in ((0, 1), (1, 2), (2, 0)):
        torch.testing.assert_close(broken.next_distribution(torch.tensor([n])), p[:, row])


def test_the_likeliest_draft_tokens_keep_their_q():
    drafts = []
    for drafter in (FunctionDrafter(Q), Likeliest(FunctionDrafter(Q)), Likeliest(Certain(Q))):
        drafter.start([0], [[0]], None)
        drafts.append(drafter.propose([1], Draw([RowKey(0, 0)], [1], [SamplingParams(1.0)])))
    honest, likeliest, certain = drafts
    torch.testing.assert_close(likeliest.q, honest.q)
    assert likeliest.tokens.tolist() == [[int(Q((0,)).argmax())]]
    assert certain.q is None


def test_logits_of_a_block_are_one_place_off():
    honest, broken = TableModel(P, V), OffByOne(TableModel(P, V))
    for model in (honest, broken):
        model.start([[0]], None)
    logits, off = (model.score([[1, 2, 3]], [3]) for model in (honest, broken))
    torch.testing.assert_close(off, logits.roll(1, 1))
    assert [broken.model] == list(broken.holds)


V2 = 6
PLAN = CertificatePlan(gamma=1, texts=160, greedy=10, distributions=(SamplingParams(1.0),))
PROMPTS: list[Prompt] = [[1, 2], [3]]


def pair() -> Speculator:
    return Speculator(
        TableModel(random_model(1, V2), V2),
        LMDrafter(TableModel(random_model(2, V2), V2), V2),
    )


def timed(
    monkeypatch: pytest.MonkeyPatch,
    drafted: float,
    plain: float,
    greedy: float,
    plan: CertificatePlan,
) -> float:
    """By a clock for which the parts take so long, of 8 texts a prompt or 5 greedy tokens."""
    clock = accumulate([0.0, drafted, 0.0, plain, 0.0, greedy])
    monkeypatch.setattr(duration, "perf_counter", lambda: next(clock))
    return expected(pair(), PROMPTS, plan)


def test_every_part_counts_as_often_as_there_is_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    assert timed(monkeypatch, 1, 0, 0, PLAN) == pytest.approx(20 * (1 + CONTROLS))
    assert timed(monkeypatch, 0, 1, 0, PLAN) == pytest.approx(20 * 2)
    assert timed(monkeypatch, 0, 0, 5, PLAN) == pytest.approx(GREEDY * 2 * 10)
    distributions = replace(PLAN, distributions=PLAN.distributions * 2)
    assert timed(monkeypatch, 1, 1, 0, distributions) == pytest.approx(20 * (2 + CONTROLS + 4))
    thorough = replace(PLAN, texts=8 * 160)
    assert timed(monkeypatch, 1, 1, 0, thorough) == pytest.approx(160 * (3 + CONTROLS))


def test_what_cannot_be_certified_is_refused_before_anything_runs() -> None:
    with pytest.raises(InputError, match="draft is none"):
        expected(replace(pair(), drafter=NoDrafter()), PROMPTS, PLAN)
    with pytest.raises(InputError, match="there is no prompt"):
        expected(pair(), [], PLAN)
