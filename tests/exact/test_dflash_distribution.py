"""Blocks read real hidden states, so their proof runs real transformers, tiny and in float64.

Every course of three steps is enumerated, of which the first guesses nothing (a text that is alone
is read in it), and the distribution of all that comes out is the target's own, as full forwards
have it.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest

import pairs
import tiny
from blocks import (
    CONFIDENT,
    DFLASH2,
    DOMINO,
    DSPARK,
    ZLAB,
    draft,
    graph_pair,
    native_pair,
    pair,
)
from exact.worlds import Case, bias
from foretoken import SamplingParams, Speculator
from foretoken.drafters.base import Draft
from foretoken.drafters.dflash import BlockDrafter
from foretoken.models.stock.model import CausalModel
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, Rule
from foretoken.sampling.distributions import probabilities
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import Model, joint, p_value

pytestmark = pytest.mark.daily

SAMPLED = SamplingParams(temperature=1.0)
NETWORK = tiny.llama(2, context=32, seed=3).double()
OF_THREE = tiny.llama(3, context=32, seed=3).double()  # of which a selector leaves two
PROMPT = [0, 1, 1]
CONFIGS = {"certain": ZLAB, "chained": DSPARK, "stops": CONFIDENT, "selects": DFLASH2}
CONFIGS["corrected"] = DOMINO


def own(network: Any) -> Model:
    @lru_cache(None)
    def law(text: tuple[int, ...]) -> Any:
        return pairs.scores(network, list(text))[-1].softmax(-1).numpy()

    return law


class AfterTheFirst(BlockDrafter):
    """Guesses nothing in a text's first step, whether it is alone in it or not."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        begun = [len(row.tokens) > len(PROMPT) for row in self.seqs]
        return super().propose([g * b for g, b in zip(gamma, begun, strict=True)], draw)


def case(
    config: dict[str, Any],
    rule: Rule,
    gamma: int,
    kind: type[BlockDrafter] = AfterTheFirst,
    params: SamplingParams = SAMPLED,
    network: Any = NETWORK,
) -> tuple[Case, Model]:
    """What runs, each drafter upon the target that was made before it; and the distribution it must
    have."""
    made: list[CausalModel] = []
    model = draft(config, network)

    def target() -> CausalModel:
        made.append(CausalModel(network))
        made[-1].tap(model.taps)
        return made[-1]

    row = Request(PROMPT, 100, SequenceKey(0, 0))
    made_case = Case(target, lambda: kind(made[-1], model), rule, gamma, params, (row,), steps=3)
    return made_case, own(network)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", CONFIGS)
def test_three_steps_leave_the_distribution_as_it_is(name, rule, monkeypatch):
    assert bias(*case(CONFIGS[name], EXACT_RULES[rule], 2), monkeypatch) < 1e-12


def test_the_rule_to_stop_is_met_in_these_worlds(monkeypatch):
    """Stopping depends on the tokens drawn, else the proof above would say little."""
    counts: set[int] = set()

    class Counts(AfterTheFirst):
        def propose(self, gamma: list[int], draw: Draw) -> Draft:
            found = super().propose(gamma, draw)
            pairs = zip(self.seqs, found.lengths.tolist(), strict=True)
            counts.update(n for row, n in pairs if len(row.tokens) > len(PROMPT))
            return found

    bias(*case(CONFIDENT, EXACT_RULES["block"], 2, Counts), monkeypatch)
    assert len(counts) > 1


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("params", [SAMPLED, SamplingParams(temperature=0.6, top_p=0.8)])
def test_proof_larger(name, rule, params, monkeypatch):
    assert bias(*case(CONFIGS[name], EXACT_RULES[rule], 3, params=params), monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_proof_of_a_selector_that_leaves_two_tokens_of_three(rule, monkeypatch):
    assert bias(*case(DFLASH2, EXACT_RULES[rule], 2, network=OF_THREE), monkeypatch) < 1e-12


class ClaimsSoftmax(AfterTheFirst):
    """Lies: says that its likeliest tokens, or a selector's, were drawn from the distributions of
    the block's logits."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        honest = super().propose(gamma, draw)
        if not honest.tokens.numel():
            return honest
        anchors = [row.tokens[-1] for row in self.seqs]
        _, logits = self.blocks.predict_block(anchors, honest.lengths.tolist())
        return replace(honest, q=probabilities(logits[:, : honest.tokens.shape[1]], SAMPLED))


class ClaimsTheNextRow(AfterTheFirst):
    """Lies: reports to each row the distributions of the one below."""

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        honest = super().propose(gamma, draw)
        return replace(honest, q=None if honest.q is None else honest.q.roll(1, 0))


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(
    ("name", "liar"),
    [
        ("certain", ClaimsSoftmax),
        ("chained", ClaimsTheNextRow),
        ("selects", ClaimsTheNextRow),
        ("selects", ClaimsSoftmax),
        ("corrected", ClaimsTheNextRow),
    ],
)
def test_other_distributions_than_those_drawn_from_show(name, liar, rule, monkeypatch):
    assert bias(*case(CONFIGS[name], EXACT_RULES[rule], 2, liar), monkeypatch) > 1e-3


@pytest.mark.prove
@pytest.mark.parametrize(
    ("make", "config", "rule"),
    [
        *((pair, config, rule) for config in (CONFIDENT, ZLAB) for rule in ("block", "coupled")),
        *((graph_pair, config, "block") for config in (CONFIDENT, DFLASH2)),
        *(
            pytest.param(native_pair, config, "block", marks=pytest.mark.native)
            for config in (CONFIDENT, DFLASH2)
        ),
    ],
)
def test_sampled_texts_have_the_target_s_distribution(make, config, rule):
    """By a chi-square whose seed is fixed: on another one it would fail once in 10 million."""
    network = tiny.llama(6, context=32, seed=10)
    params = SamplingParams(temperature=1.0, top_p=0.8, max_new_tokens=3, ignore_eos=True)
    texts = 1000
    target, drafter = make(config, network)
    found = Speculator(target=target, drafter=drafter).generate(
        [[3, 1, 4]] * texts, params, gamma=2, rule=rule, seed=1
    )

    def law(text: tuple[int, ...]) -> Any:
        logits = pairs.scores(network, [3, 1, 4, *text])[-1]
        return probabilities(logits.double(), params).numpy()

    counts = Counter(tuple(each.tokens) for each in found)
    assert p_value(counts, joint(law, 3)) > 1e-7
