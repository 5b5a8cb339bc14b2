"""Lenience keeps its word: two steps have the distribution that appendix A.5 gives, worked out
naively.

Not the target's distribution: how far it is from that, and that the record's bound holds, is
checked too. No chance is involved: 1e-12 is rounding.
"""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest

import oracle
from exact.drafters import Certain, FunctionDrafter
from exact.worlds import Case, Table, bias, distribution_of
from foretoken.sampling.acceptance_rules import EXACT_RULES, Outcome, block, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.lenience import make_lenient
from oracle import extend, joint, random_model, tv

pytestmark = pytest.mark.daily

V, GAMMA = 3, 2
P, Q = random_model(1, V, zeros=0.15), random_model(2, V, zeros=0.15)
PROMPT = (0,)
VISIBLE = 1e-3
LENIENCES = [0.8, 0.3, 0.05]


def one_hot(text):
    return np.eye(V)[int(Q(text).argmax())]


KINDS = {"q": (lambda: FunctionDrafter(Q), Q), "q None": (lambda: Certain(Q), one_hot)}


def lenient_distribution(p, q, lenience):
    most = np.minimum(q, p / lenience)
    return most + (1 - most.sum()) * oracle.residual(p, q)


def lenient_block(p, q, x, lenience):
    distributions = [lenient_distribution(p[i], q[i], lenience) for i in range(len(x))]
    return oracle.block_verification(np.array([*distributions, p[len(x)]]), q, x)


NAIVE = {"speculative": oracle.algorithm1, "block": lenient_block}


def texts_of(monkeypatch, drafter, rule, lenience, steps=2, **how):
    case = Case(lambda: Table(P, V), drafter, rule, GAMMA, lenience=lenience, steps=steps, **how)
    return {texts[0]: weight for texts, weight in distribution_of(case, monkeypatch).items()}


def naive(verify, draft_token, lenience, steps=2):
    return oracle.steps(P, draft_token, GAMMA, partial(verify, lenience=lenience), steps, PROMPT)


@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_two_steps_have_the_distribution_of_the_appendix(rule, kind, lenience, monkeypatch):
    """Algorithm 1 by the printed comparison and norm((p - q)+), nothing said of another
    distribution."""
    drafter, draft_token = KINDS[kind]
    texts = texts_of(monkeypatch, drafter, EXACT_RULES[rule], lenience)
    assert tv(texts, naive(NAIVE[rule], draft_token, lenience)) < 1e-12


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_step_is_exact_for_another_distribution(rule, kind, monkeypatch):
    """Whatever the rule, draft tokens have the distribution P_l and the token after a whole block
    has p."""
    drafter, draft_token = KINDS[kind]

    def other(text):
        whole = (*PROMPT, *text)
        return (
            lenient_distribution(P(whole), draft_token(whole), 0.3)
            if len(text) < GAMMA
            else P(whole)
        )

    texts = texts_of(monkeypatch, drafter, EXACT_RULES[rule], 0.3, steps=1)
    assert tv(extend(texts, other, GAMMA + 1), joint(other, GAMMA + 1)) < 1e-12


@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.parametrize("rule", EXACT_RULES)
def test_the_recorded_biases_bound_the_distance(rule, lenience, monkeypatch):
    """Total variation over texts is at most the expected sum of alpha_l - alpha over the draft
    tokens judged; and it is not zero."""

    def at(text):
        p, q = P(text), Q(text)
        return float(np.minimum(p / lenience, q).sum() - np.minimum(p, q).sum())

    case = Case(lambda: Table(P, V), KINDS["q"][0], EXACT_RULES[rule], GAMMA, lenience=lenience)
    expected = 0.0
    first = naive(NAIVE[rule], Q, lenience, steps=1)
    seconds = {
        text: oracle.steps(
            P, Q, GAMMA, partial(NAIVE[rule], lenience=lenience), 1, (*PROMPT, *text)
        )
        for text in first
    }
    for text, weight in first.items():
        judged = [(*PROMPT, *text[:i]) for i in range(min(len(text), GAMMA))]
        expected += weight * sum(map(at, judged))
        for more, chance in seconds[text].items():
            judged = [(*PROMPT, *text, *more[:i]) for i in range(min(len(more), GAMMA))]
            expected += weight * chance * sum(map(at, judged))
    assert VISIBLE < bias(case, P, monkeypatch) <= expected + 1e-12


@pytest.mark.parametrize("lenience", LENIENCES)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_lenience(kind, lenience, monkeypatch):
    """Two steps at temperature 0; no token has less than l times the likeliest's probability."""
    drafter, draft_token = KINDS[kind]
    texts = texts_of(monkeypatch, drafter, block, lenience, params=SamplingParams())
    assert tv(texts, naive(oracle.lenient_greedy, draft_token, lenience)) < 1e-12
    for text in texts:
        for i, token in enumerate(text):
            distribution = P((*PROMPT, *text[:i]))
            assert distribution[token] >= lenience * distribution.max() - 1e-12


# Negative controls: what is nearly lenience must be told from it


class OtherResidual(Outcome):
    """After a rejection norm((p - l q)+), which the paper's text allows too."""

    def compute_next_distribution(self, n):
        o = Outcome(self.survival, self.p, self.q * 0.3, self.x, self.lengths, self.scale)
        return o.compute_next_distribution(n)


def upside_down(p, q, x, lengths):
    """l on the wrong side of the comparison."""
    return speculative(p, q / 0.3, x, lengths)


def other_residual(p, q, x, lengths):
    o = speculative(p, q * 0.3, x, lengths)
    return OtherResidual(o.survival, p, q, x, lengths, o.scale)


def bonus_too(p, q, x, lengths):
    """The bonus is biased as well."""
    o = make_lenient(speculative, 0.3)(p, q, x, lengths)
    distribution = o.p.clone()
    distribution[:, -1] = distribution[:, -1] ** 2 / (distribution[:, -1] ** 2).sum(
        -1, keepdim=True
    )
    return Outcome(o.survival, distribution, o.q, o.x, o.lengths, o.scale)


@pytest.mark.parametrize("rule", [upside_down, other_residual, bonus_too, speculative])
def test_what_is_not_lenience_is_seen(rule, monkeypatch):
    texts = texts_of(monkeypatch, KINDS["q"][0], rule, 1.0)
    assert tv(texts, naive(oracle.algorithm1, Q, 0.3)) > VISIBLE


def test_the_printed_greedy_inequality_is_not_ours(monkeypatch):
    """p(x) <= l max p keeps other tokens; at l = 1 it would keep all."""

    def printed(p, q, x, lenience):
        n = 0
        while n < len(x) and p[n, x[n]] <= lenience * p[n].max():
            n += 1
        return [(1.0, n, np.eye(V)[int(p[n].argmax())])]

    texts = texts_of(monkeypatch, KINDS["q"][0], block, 0.3, params=SamplingParams())
    assert tv(texts, naive(printed, Q, 0.3)) > VISIBLE
