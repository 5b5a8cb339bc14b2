"""Assistants read their target's keys and values, so their proof runs real transformers, tiny and
in float64: every course of two steps is enumerated.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm

import assistants
import oracle
import pairs
from exact.worlds import Case, bias
from foretoken.drafters.assistant import AssistantDrafter
from foretoken.drafters.base import Draft
from foretoken.engine.batch import Batch
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, Rule
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import Model, Text

pytestmark = pytest.mark.daily

VISIBLE = 1e-3
SAMPLED = SamplingParams(temperature=1.0)
CUT = SamplingParams(temperature=0.6, top_p=0.8)


@pytest.fixture(autouse=True)
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """Norms of Gemma 4 compute in float32, whatever the model's dtype."""

    def forward(norm: Any, states: Tensor) -> Tensor:
        states = norm._norm(states)
        return states * norm.weight if norm.with_scale else states

    monkeypatch.setattr(Gemma4RMSNorm, "forward", forward)


@pytest.fixture(autouse=True)
def read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row that is alone is read in its first step, which then has no draft tokens; its worlds are
    those of rows that are not."""
    head = Batch._select_prefill
    monkeypatch.setattr(
        Batch, "_select_prefill", lambda self, row, read, last: head(self, row, read, False)
    )


def own_distribution(V: int) -> Model:
    net = assistants.target(V)

    @lru_cache(None)
    def distribution(text: Text) -> np.ndarray:
        return pairs.scores(net, list(text))[-1].softmax(-1).numpy()

    return distribution


def case(
    rule: Rule,
    V: int = 2,
    gamma: int = 2,
    kind: type[AssistantDrafter] = AssistantDrafter,
    params: SamplingParams = SAMPLED,
    prompt: tuple[int, ...] = (0, 1, 1),
) -> tuple[Case, Model]:
    """The run, each drafter upon the target that was made before it; and the distribution it must
    have."""
    made: list[Any] = []
    network = assistants.network(V, ordered=V > 2)

    def target() -> Any:
        made.append(assistants.running(assistants.target(V)))
        return made[-1]

    def drafter() -> AssistantDrafter:
        return assistants.drafter(made[-1], network, kind)

    row = Request(list(prompt), 100, SequenceKey(0, 0))
    return Case(target, drafter, rule, gamma, params, (row,)), own_distribution(V)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("V", "gamma"), [(2, 2), (3, 1)])
def test_two_steps_leave_the_distribution_as_it_is(V, gamma, rule, monkeypatch):
    """Of three tokens, an assistant says that one is impossible; all are beyond the window at the
    end."""
    assert bias(*case(EXACT_RULES[rule], V, gamma), monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_the_distribution_is_the_standardized_one(rule, monkeypatch):
    assert bias(*case(EXACT_RULES[rule], 3, 1, params=CUT), monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("params", [SAMPLED, CUT])
@pytest.mark.parametrize(("V", "gamma"), [(2, 3), (3, 2)])
def test_proof_larger(V, gamma, params, rule, monkeypatch):
    """From one token on, where the first step has no state and drafts nothing, and from many."""
    for prompt in (1,), (0, 1, 1, 0, 1, 0, 1):
        assert (
            bias(*case(EXACT_RULES[rule], V, gamma, params=params, prompt=prompt), monkeypatch)
            < 1e-12
        )


class Noting:
    """Notes the logits that are drawn from, and may draw the likeliest."""

    def __init__(self, draw: Draw, *, likeliest: bool = False) -> None:
        self.draw, self.likeliest = draw, likeliest
        self.raw: list[Tensor] = []

    def sample(self, logits: Tensor, i: int) -> tuple[Tensor, Tensor | None]:
        self.raw.append(logits.softmax(-1))
        return (logits.argmax(-1), None) if self.likeliest else self.draw.sample(logits, i)


class ClaimsRaw(AssistantDrafter):
    """Lies: says that draft tokens were drawn at temperature 1, with nothing cut."""

    likeliest = False

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        noting = Noting(draw, likeliest=self.likeliest)
        honest = super().propose(gamma, noting)  # pyright: ignore[reportArgumentType]
        raw = torch.stack(noting.raw, 1)
        return Draft(honest.tokens, honest.lengths, raw, honest.calls, honest.tops)


class ClaimsRawOfTheLikeliest(ClaimsRaw):
    """Takes the likeliest token and says that it was drawn (transformers #47932)."""

    likeliest = True


class ClaimsAMate(AssistantDrafter):
    """Lies: gives each row the distributions of the row before it."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        honest = super().propose(gamma, draw)
        assert honest.q is not None
        q = honest.q.roll(1, 0)
        return Draft(honest.tokens, honest.lengths, q, honest.calls, honest.tops)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(
    ("kind", "params"),
    [(ClaimsRaw, CUT), (ClaimsRawOfTheLikeliest, SAMPLED), (ClaimsAMate, SAMPLED)],
)
def test_another_distribution_shows(kind, params, rule, monkeypatch):
    assert bias(*case(EXACT_RULES[rule], 3, 1, kind, params), monkeypatch) > VISIBLE


def test_oracle_and_step_standardize_alike():
    """What the proofs compare with: mass is cut at this target."""
    distribution = own_distribution(3)((0, 1, 1))
    cut = oracle.standardize(np.log(distribution), CUT.temperature, CUT.top_k, CUT.top_p)
    assert 0 < (cut > 0).sum() < 3
