"""Heads read real hidden states, so their proof runs real transformers, tiny and in float64.

Every course of three steps is enumerated (the first has no state and guesses nothing), and the
distribution of all that comes out is the target's own, as full forwards have it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

import pairs
import tiny
from exact.worlds import Case, bias
from foretoken.drafters.base import Draft
from foretoken.models.stock.selfcheck import build_torch_model
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, Rule
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import Model
from reproduction.blockwise import Heads, ends_of
from reproduction.heads import HeadsDrafter

SOURCE = [2, 1, 1]
SAMPLED = SamplingParams(temperature=1.0)


def causal() -> PreTrainedModel:
    return tiny.llama(2, context=32, seed=3).double()


def seq2seq() -> PreTrainedModel:
    return tiny.t5(3, seed=4).double()


def own_distribution(network: PreTrainedModel, source: list[int] | None) -> Model:
    @lru_cache(None)
    def distribution(text):
        return pairs.scores(network, list(text), source)[-1].softmax(-1).numpy()

    return (
        (lambda text: distribution(text))
        if source is None
        else lambda text: distribution(text[len(source) :])
    )


def untrained(network: PreTrainedModel, count: int) -> Heads:
    """Heads whose distributions are their own and far from flat."""
    heads = Heads.fresh(network, count).double()
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        heads.outer += torch.randn(heads.outer.shape, generator=random, dtype=torch.float64)
    return heads


def case(
    network: PreTrainedModel,
    rule: Rule,
    gamma: int,
    kind: type[HeadsDrafter] = HeadsDrafter,
    count: int = 2,
    params: SamplingParams = SAMPLED,
) -> tuple[Case, Model]:
    """What runs, each drafter upon the target that was made before it; and the distribution it must
    have."""
    made: list = []
    heads, ends = untrained(network, count), ends_of(network)

    def target():
        made.append(build_torch_model(network))
        return made[-1]

    source = SOURCE if network.config.is_encoder_decoder else None
    prompt = [1] if source else [0, 1, 1]
    row = Request(prompt, 100, SequenceKey(0, 0), source=source)
    drafter: Callable = lambda: kind(made[-1], heads, *ends)  # noqa: E731
    return Case(target, drafter, rule, gamma, params, (row,), steps=3), own_distribution(
        network, source
    )


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("make", "gamma", "count"), [(causal, 2, 2), (seq2seq, 1, 1)])
def test_three_steps_leave_the_distribution_as_it_is(make, gamma, count, rule, monkeypatch):
    assert bias(*case(make(), EXACT_RULES[rule], gamma, count=count), monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("make", "gamma"), [(causal, 3), (seq2seq, 2)])
def test_proof_larger(make, gamma, rule, monkeypatch):
    """Gamma 3 is more than the two heads there are."""
    assert bias(*case(make(), EXACT_RULES[rule], gamma), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_the_distribution_is_the_standardized_one(rule, monkeypatch):
    params = SamplingParams(temperature=0.6, top_k=2)
    assert bias(*case(seq2seq(), EXACT_RULES[rule], 1, params=params), monkeypatch) < 1e-12


class ClaimsTheFirst(HeadsDrafter):
    """Lies: says that every draft token was drawn from the first head's distribution."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        honest = super().propose(gamma, draw)
        q = honest.q
        claimed: Tensor | None = None if q is None else q[:, :1].expand_as(q)
        return Draft(honest.tokens, honest.lengths, claimed, honest.calls, honest.tops)


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_another_head_s_distribution_shows(rule, monkeypatch):
    assert bias(*case(causal(), EXACT_RULES[rule], 2, ClaimsTheFirst), monkeypatch) > 1e-3
