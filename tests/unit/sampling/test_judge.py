"""Judges report the target's laws, what they judged by, and tokens that follow from both."""

from __future__ import annotations

import pytest
import torch

from foretoken.sampling.distributions import law
from foretoken.sampling.judge import (
    COUPLED,
    Coupled,
    Greedy,
    JudgedBlock,
    LenientGreedy,
    Sampled,
    choose,
)
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verify import block, overlap

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.7, top_k=4)
JUDGES = [(Sampled(block), SAMPLED), (Coupled(), SAMPLED), (choose(block, 0.5), SAMPLED)]
B, G, V = 3, 2, 6


def guessed(certain: bool = False) -> JudgedBlock:
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(B, G + 1, V, generator=rng)
    q = None if certain else torch.randn(B, G, V, generator=rng).softmax(-1)
    x = torch.randint(V, (B, G), generator=rng)
    return JudgedBlock(logits, x, torch.tensor([2, 1, 0]), q)


def verdict(judge, params: SamplingParams, certain: bool = False):
    draw = judge.draws([RowKey(0, b) for b in range(B)], [5] * B, [params] * B)
    return judge(guessed(certain), draw)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize(("judge", "params"), JUDGES)
def test_a_verdict_carries_the_targets_laws(judge, params, certain) -> None:
    guesses = guessed(certain)
    result = verdict(judge, params, certain)
    assert torch.equal(result.p, law(guesses.logits, params))
    assert (result.n <= guesses.lengths).all()
    assert (result.p[torch.arange(B), result.n].gather(1, result.t[:, None]) > 0).all()


def test_only_a_lenient_judge_is_biased() -> None:
    exact, lenient = (verdict(choose(block, x), SAMPLED) for x in (1.0, 0.5))
    assert exact.bias is None
    assert torch.equal(exact.beta, overlap(exact.p, guessed().q, guessed().x))
    assert (lenient.bias[0] > 0).any() and (lenient.beta >= exact.beta - 1e-12).all()


@pytest.mark.parametrize("judge", [Greedy(), LenientGreedy(0.9)])
def test_at_temperature_0_there_is_no_law(judge) -> None:
    given, found = guessed(), verdict(judge, GREEDY)
    assert found.p is None
    best = given.logits.argmax(-1)
    assert torch.equal(found.t, best[torch.arange(B), found.n])


def test_the_judge_follows_from_temperature_and_lenience() -> None:
    judges = [choose(block, x) for x in (1.0, 0.5)]
    assert [type(judge.greedy) for judge in judges] == [Greedy, LenientGreedy]
    assert [type(judge.sampled) for judge in judges] == [Sampled, Sampled]


@pytest.mark.parametrize("lenience", [1.0, 0.5])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("certain", [False, True])
def test_greedy_rows_among_sampled_ones_are_judged_as_alone(certain, coupled, lenience) -> None:
    if coupled and lenience != 1:
        return  # these two are refused together
    judge, given = COUPLED if coupled else choose(block, lenience), guessed(certain)
    params = [SAMPLED, GREEDY, SamplingParams(temperature=1.3)]
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        keys, own = [RowKey(0, b) for b in order], [params[b] for b in order]
        together = judge(given.of(order), judge.draws(keys, [5] * B, own))
        for place, b in enumerate(order):
            alone = judge(given.of([b]), judge.draws([RowKey(0, b)], [5], [params[b]]))
            assert int(together.n[place]) == int(alone.n[0])
            assert int(together.t[place]) == int(alone.t[0])
            assert torch.equal(together.beta[place], alone.beta[0])
            assert torch.equal(together.p[place], law(given.logits[b], params[b]))
            bias = torch.zeros(G).double() if alone.bias is None else alone.bias[0]
            assert torch.equal(together.bias[place], bias)
