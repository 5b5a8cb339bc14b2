"""Lenience at one position: the guarantees of appendix A.5, on random distributions."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretoken import theory
from foretoken.errors import InputError
from foretoken.inputs import resolve_verifier
from foretoken.sampling.acceptance_rules import EXACT_RULES, block, speculative
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.lenience import compute_lenient_distribution, find_near_best, make_lenient
from foretoken.sampling.verifier import (
    GreedyVerifier,
    LenientGreedyVerifier,
    SampledVerifier,
    ScoredBlock,
    TemperatureVerifier,
    make_verifier,
)

V = 5
SAMPLED = SamplingParams(temperature=1.0)


def distributions(count: int = 40) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(3)
    pairs = rng.gamma(0.5, size=(count, 2, V)) * (rng.random((count, 2, V)) > 0.2) + 1e-12
    pairs[0, 1] = pairs[0, 0]  # a draft that is the target
    pairs /= pairs.sum(-1, keepdims=True)
    return [(p, q) for p, q in pairs]


def tensor(distribution: np.ndarray) -> torch.Tensor:
    return torch.tensor(distribution)[None, None]


def bias_of(p, q, lenience: float) -> float:
    """How far the output is from p, as total variation."""
    return theory.lenient_beta(p, q, lenience) - theory.beta(p, q)


@pytest.mark.parametrize("rule", EXACT_RULES.values(), ids=EXACT_RULES)
def test_the_bonus_and_padding_stay_as_they_are(rule):
    p = torch.tensor(np.array([p for p, _ in distributions(8)])).reshape(2, 4, V)
    q = p.flip(0)[:, :3].clone()
    q[0, 1:] = torch.nan  # padding
    lengths = torch.tensor([1, 3])
    outcome = make_lenient(rule, 0.3)(p, q, torch.tensor([[1, 0, 0], [1, 2, 3]]), lengths)
    assert torch.equal(outcome.p[0, 1:], p[0, 1:]) and torch.equal(outcome.p[1, 3], p[1, 3])
    assert torch.equal(outcome.compute_next_distribution(lengths), p[[0, 1], lengths])
    assert not torch.equal(outcome.p[0, 0], p[0, 0])


def test_what_the_verifier_reports():
    """Beta and bias at every draft token are those of the theory, sampled and at temperature 0."""
    (p, q), lenience = distributions(5)[-1], 0.4
    logits = tensor(p).log().expand(1, 3, V)
    x, lengths = torch.tensor([[1, 2]]), torch.tensor([2])
    for params in SAMPLED, SamplingParams():
        draw = Draw([SequenceKey(0, 0)], [1], [params])
        drafted = ScoredBlock(logits, x, lengths, tensor(q).expand(1, 2, V))
        verification = make_verifier(block, lenience)(drafted, draw)
        if params.greedy:
            beta = theory.greedy_lenient_beta(p, q, lenience)
            kept = [p[i] >= lenience * p.max() for i in (1, 2)]
            bias = [float(k and i != p.argmax()) for k, i in zip(kept, (1, 2), strict=True)]
        else:
            beta = theory.lenient_beta(p, q, lenience)
            bias = [bias_of(p, q, lenience)] * 2
        np.testing.assert_allclose(verification.beta[0], [beta] * 2, atol=1e-12)
        np.testing.assert_allclose(verification.bias[0], bias, atol=1e-12)


def test_lenience_1_is_todays_path():
    assert (
        make_verifier(block, 1.0)
        == TemperatureVerifier(GreedyVerifier(), SampledVerifier(block))
        == make_verifier(block)
    )
    assert make_verifier(block, 0.5).greedy == LenientGreedyVerifier(0.5)


def test_near_the_best():
    logits = torch.tensor([0.5, 0.26, 0.24, 0.0]).log()
    assert find_near_best(logits, 0.5).tolist() == [True, True, False, False]
    assert find_near_best(logits.bfloat16(), 0.4).tolist() == [True, True, True, False]
    assert find_near_best(logits, 1e-9).tolist() == [
        True,
        True,
        True,
        False,
    ]  # never the impossible


@pytest.mark.parametrize("lenience", [0.0, -0.1, 1.01, float("nan"), "1", None, True, 1e-50])
def test_what_is_no_lenience(lenience):
    with pytest.raises(
        InputError, match=r"^lenience is .*; give a number from 1e-30 to 1 \(1: exact"
    ):
        make_lenient(speculative, lenience)
    with pytest.raises(InputError, match="^lenience is "):
        resolve_verifier(2, "block", lenience)
    with pytest.raises(InputError, match="^lenience is "):
        theory.lenient_beta([1.0], [1.0], lenience)


def test_the_least_lenience_has_a_distribution_in_float32():
    """p / l is finite there, and 0 where p is."""
    p, q = torch.tensor([[[1.0, 0.0, 1e-38]]]), torch.tensor([[[0.25, 0.5, 0.25]]])
    for x in range(3):
        at = torch.tensor([[x]])
        for distribution in (
            compute_lenient_distribution(p, q, at, 1e-30),
            compute_lenient_distribution(p, None, at, 1e-30),
        ):
            assert distribution[0, 0, 1] == 0 and float(distribution.sum()) == pytest.approx(1)
