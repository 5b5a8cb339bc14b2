"""Whatever drafts and whichever rule verifies, two steps leave the target's distribution as it is.

Every course of two consecutive steps of the real engine is run with its probability, every text
that comes out is completed by the target, and the distribution of the whole is compared with the
target's. No chance is involved: 1e-12 is rounding.
"""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from torch import Tensor

import foretoken.step as step_module
from exact.drafters import Certain, FunctionDrafter, Wide
from exact.worlds import Case, Table, bias, distribution_of, standardized
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.models.base import Capabilities
from foretoken.request import Request
from foretoken.sampling.acceptance_rules import EXACT_RULES, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from oracle import Model, extend, joint, random_model, tv

V, GAMMA = 3, 2
KEY = SequenceKey(0, 0)
SAMPLED = SamplingParams(temperature=1.0)


def target(V: int = V, zeros: float = 0.15) -> Model:
    return random_model(1, V, zeros)


def other(V: int = V) -> Model:
    return random_model(2, V, zeros=0.15)


def drafters(V: int) -> dict:
    """Every kind of drafter; what it may look at before it stops is the contract of drafters."""
    q = other(V)
    return {
        "lm": lambda: LMDrafter(Table(q, V), V),
        "lm-is-target": lambda: LMDrafter(Table(target(V), V), V),
        "lm-smaller-vocabulary": lambda: LMDrafter(Table(lambda t: q(t)[:-1] + 0.1, V - 1), V),
        "lm-larger-vocabulary": lambda: LMDrafter(Table(random_model(3, V + 1), V + 1), V),
        "lm-short-context": lambda: LMDrafter(Table(q, V, context=2), V),
        "certain": lambda: Certain(q),
        "lookup": lambda: LookupDrafter(),
        "uniform": lambda: UniformDrafter(V),
        "stops-after-a-doubtful-guess": lambda: FunctionDrafter(
            q, after=lambda distribution, x: distribution[x] < 0.5
        ),
        "stops-before-a-flat-law": lambda: FunctionDrafter(
            q, before=lambda distribution, i: bool(distribution.max() < 0.6)
        ),
        "wide-padding": lambda: Wide(q, after=lambda distribution, x: distribution[x] < 0.5),
        "never-guesses": lambda: FunctionDrafter(q, before=lambda distribution, i: True),
    }


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", drafters(V))
def test_two_steps_leave_the_distribution_as_it_is(kind, rule, monkeypatch):
    p = target()
    case = Case(lambda: Table(p, V), drafters(V)[kind], EXACT_RULES[rule], GAMMA)
    assert bias(case, p, monkeypatch) < 1e-12


class Tensors(Table):
    """Takes blocks as tensors, as models on a device do: a row's are its first need[b] ids."""

    capabilities = Capabilities(tensors=True)

    def score(self, blocks, need):
        if isinstance(blocks, Tensor):
            blocks = [row[:n] for row, n in zip(blocks.tolist(), need, strict=True)]
        return super().score(blocks, need)


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", ["lm", "lm-short-context", "lookup", "wide-padding"])
def test_draft_tokens_that_stay_in_tensors(kind, rule, monkeypatch):
    """No list of a row's draft tokens before the verdict; rows past their draft's end are
    padding."""
    p, q = target(), other()
    context = 2 if kind == "lm-short-context" else None
    tensors = {"lm": lambda: LMDrafter(Tensors(q, V, context=context), V)}
    drafter = tensors.get(kind.removesuffix("-short-context"), drafters(V)[kind])
    case = Case(lambda: Tensors(p, V), drafter, EXACT_RULES[rule], GAMMA)
    assert bias(case, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(
    "params",
    [
        SamplingParams(temperature=0.7),
        SamplingParams(temperature=1.0, top_k=2),
        SamplingParams(temperature=1.3, top_p=0.8),
        SamplingParams(temperature=0.9, top_k=3, top_p=0.9, min_p=0.1),
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1e-6),
    ],
    ids=str,
)
def test_the_distribution_is_the_standardized_one(params, rule, monkeypatch):
    p = target()
    for kind in "lm", "certain":
        case = Case(lambda: Table(p, V), drafters(V)[kind], EXACT_RULES[rule], GAMMA, params)
        assert bias(case, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize(("V", "gamma"), [(2, 3), (4, 1)])
def test_other_sizes(V, gamma, rule, monkeypatch):
    p = target(V)
    for kind in "lm", "uniform", "stops-after-a-doubtful-guess":
        case = Case(lambda: Table(p, V), drafters(V)[kind], EXACT_RULES[rule], gamma)
        assert bias(case, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", ["lm", "certain", "lookup"])
def test_an_end_of_sequence_ends_the_text_wherever_it_falls(kind, rule, monkeypatch):
    """Inside the kept block too: what stands behind it is gone, and the row is done."""
    p = target()
    row = Request([0], 100, KEY, eos=frozenset({1}))
    case = Case(
        lambda: Table(p, V), drafters(V)[kind], EXACT_RULES[rule], GAMMA, rows=(row,), steps=2
    )
    assert bias(case, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("limit", [1, 2, 4])
def test_a_limit_inside_a_block(limit, rule, monkeypatch):
    """With steps enough to reach it, every text has exactly that length."""
    p = target()
    row = Request([0], limit, KEY)
    case = Case(
        lambda: Table(p, V), drafters(V)["lm"], EXACT_RULES[rule], GAMMA, rows=(row,), steps=limit
    )
    assert bias(case, p, monkeypatch) < 1e-12
    assert {len(text) for (text,) in distribution_of(case, monkeypatch)} == {limit}


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("encoder_decoder", [True, False], ids=["draft too", "draft decodes only"])
def test_an_encoder_decoder(encoder_decoder, rule, monkeypatch):
    p, q = target(), other()
    row = Request([0], 100, KEY, source=[2, 1])
    case = Case(
        lambda: Table(p, V, encoder_decoder=True),
        lambda: LMDrafter(Table(q, V, encoder_decoder=encoder_decoder), V),
        EXACT_RULES[rule],
        GAMMA,
        rows=(row,),
    )
    assert bias(case, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_a_forced_token_is_certain_and_the_rest_keeps_its_distribution(rule, monkeypatch):
    p = target()
    row = Request([0], 100, KEY, forced={1: 2})

    def forced(text):
        return np.eye(V)[2] if len(text) == 2 else p(text)  # the prompt has one token

    case = Case(lambda: Table(p, V), drafters(V)["lm"], EXACT_RULES[rule], GAMMA, rows=(row,))
    assert bias(case, forced, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_ragged_rows_are_independent(rule, monkeypatch):
    """Two rows of different length and gamma in one batch: their joint distribution is a
    product."""
    p, q = target(2), other(2)
    # room for 2: one draft token at most
    rows = (Request([0], 100, KEY), Request([1, 0, 1], 2, KEY))
    case = Case(
        lambda: Table(p, 2),
        lambda: FunctionDrafter(q, after=lambda distribution, x: distribution[x] < 0.5),
        EXACT_RULES[rule],
        2,
        rows=rows,
        steps=1,
        together=False,
    )
    distribution = distribution_of(case, monkeypatch)
    owns = [standardized(p, SAMPLED, tuple(row.prompt)) for row in rows]
    marginals = [{}, {}]
    for texts, weight in distribution.items():
        for text, marginal in zip(texts, marginals, strict=True):
            marginal[text] = marginal.get(text, 0.0) + weight
    for a, b in itertools.product(*marginals):
        assert abs(distribution.get((a, b), 0.0) - marginals[0][a] * marginals[1][b]) < 1e-12
    for own, marginal, length in zip(owns, marginals, (3, 2), strict=True):
        assert tv(extend(marginal, own, length), joint(own, length)) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
def test_ragged_rows_over_two_steps(rule, monkeypatch):
    """Rows of different lengths, drafts and ends share the batch of worlds; each keeps its
    distribution."""
    p, q = target(), other()
    rows = [Request([0], 100, KEY), Request([1, 0, 2], 3, KEY, eos=frozenset({0}))]
    for row in rows:
        case = Case(
            lambda: Table(p, V),
            lambda: LMDrafter(Table(q, V, context=4), V),
            EXACT_RULES[rule],
            GAMMA,
            rows=(row,),
        )
        assert bias(case, p, monkeypatch) < 1e-12


@pytest.mark.prove
@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", drafters(V))
@pytest.mark.parametrize(("V", "gamma", "steps"), [(2, 3, 2), (3, 3, 2), (4, 2, 2), (2, 2, 3)])
def test_proof_larger(V, gamma, steps, kind, rule, monkeypatch):
    p = target(V)
    for params in SAMPLED, SamplingParams(temperature=0.8, top_p=0.9):
        case = Case(
            lambda: Table(p, V), drafters(V)[kind], EXACT_RULES[rule], gamma, params, steps=steps
        )
        assert bias(case, p, monkeypatch) < 1e-12


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", drafters(2))
def test_a_drafter_that_joins_behind_the_first_token(kind, rule, monkeypatch):
    p = target(2)
    case = Case(lambda: Table(p, 2), drafters(2)[kind], EXACT_RULES[rule], 2, steps=3, behind=True)
    assert bias(case, p, monkeypatch) < 1e-12


def test_block_keeps_more_than_speculative():
    """The example of arXiv 2403.10444: 10/9 draft tokens accepted by Algorithm 1, 11/9 by the
    block."""
    p = torch.tensor([1 / 3, 2 / 3], dtype=torch.float64)
    q = torch.tensor([2 / 3, 1 / 3], dtype=torch.float64)
    kept = dict.fromkeys(EXACT_RULES, 0.0)
    for x in itertools.product(range(2), repeat=2):
        drawn = float(q[x[0]] * q[x[1]])
        for name, rule in EXACT_RULES.items():
            outcome = rule(
                p.expand(1, 3, 2), q.expand(1, 2, 2), torch.tensor([x]), torch.tensor([2])
            )
            kept[name] += drawn * float(outcome.survival.sum())
    assert kept["speculative"] == pytest.approx(10 / 9, abs=1e-12)
    assert kept["block"] == pytest.approx(11 / 9, abs=1e-12)


def test_the_enumeration_sees_every_course(monkeypatch):
    """With the target as its own draft all draft tokens are kept: one world per text, and no
    more."""
    p = random_model(1, V)
    case = Case(lambda: Table(p, V), lambda: LMDrafter(Table(p, V), V), speculative, GAMMA)
    distribution = distribution_of(case, monkeypatch)
    assert {len(text) for (text,) in distribution if distribution[(text,)] > 1e-12} == {
        2 * (GAMMA + 1)
    }
    assert sum(weight > 1e-12 for weight in distribution.values()) == V ** (2 * (GAMMA + 1))


def dying(model: Model) -> Model:
    """The same distribution, with invalid logits behind two equal tokens."""

    def distribution(text):
        return 0 * model(text) if len(text) > 2 and text[-1] == text[-2] else model(text)

    return distribution


@pytest.mark.parametrize("rule", EXACT_RULES)
@pytest.mark.parametrize("kind", ["lm", "lm-is-target", "uniform", "stops-after-a-doubtful-guess"])
def test_texts_that_get_to_invalid_logits_end_there_and_no_others(kind, rule, monkeypatch):
    """Guesses behind such a place are not judged: which are follows from the text up to there."""
    p = dying(target())
    case = Case(lambda: Table(p, V), drafters(V)[kind], EXACT_RULES[rule], 3, steps=1)
    assert bias(case, p, monkeypatch) < 1e-12
    texts = {text for (text,) in distribution_of(case, monkeypatch)}
    assert any(len(text) == 2 and text[0] == text[1] for text in texts)


def test_a_draft_token_that_leads_to_invalid_logits_must_be_judged(monkeypatch):
    """Negative control: to leave it out, as if the draft had stopped before it, shifts the
    distribution."""
    leading = step_module._count_leading_valid
    monkeypatch.setattr(
        step_module, "_count_leading_valid", lambda valid: (leading(valid) - 1).clamp(min=0)
    )
    p = dying(target())
    case = Case(lambda: Table(p, V), drafters(V)["lm"], EXACT_RULES["speculative"], 3, steps=1)
    assert bias(case, p, monkeypatch) > 1e-3
