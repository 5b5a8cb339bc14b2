"""Judges report the target's distributions, what they judged by, and tokens that follow from
both."""

from __future__ import annotations

import pytest
import torch

from foretoken.sampling.acceptance_rules import block, find_drafted, overlap
from foretoken.sampling.distributions import probabilities
from foretoken.sampling.keys import SequenceKey
from foretoken.sampling.params import SamplingParams
from foretoken.sampling.verifier import (
    COUPLED_VERIFIER,
    CoupledVerifier,
    SampledVerifier,
    ScoredBlock,
    make_verifier,
)

GREEDY, SAMPLED = SamplingParams(), SamplingParams(temperature=0.7, top_k=4)
VERIFIERS = [
    (SampledVerifier(block), SAMPLED),
    (CoupledVerifier(), SAMPLED),
    (make_verifier(block, 0.5), SAMPLED),
]
B, G, V = 3, 2, 6


def drafted(certain: bool = False) -> ScoredBlock:
    rng = torch.Generator().manual_seed(1)
    logits = torch.randn(B, G + 1, V, generator=rng)
    q = None if certain else torch.randn(B, G, V, generator=rng).softmax(-1)
    x = torch.randint(V, (B, G), generator=rng)
    return ScoredBlock(logits, x, torch.tensor([2, 1, 0]), q)


def verification(verifier, params: SamplingParams, certain: bool = False):
    draw = verifier.draw_class([SequenceKey(0, b) for b in range(B)], [5] * B, [params] * B)
    return verifier(drafted(certain), draw)


@pytest.mark.parametrize("certain", [False, True])
@pytest.mark.parametrize(("verifier", "params"), VERIFIERS)
def test_a_verification_carries_the_targets_distributions(verifier, params, certain) -> None:
    draft_tokens = drafted(certain)
    result = verification(verifier, params, certain)
    assert torch.equal(result.p, probabilities(draft_tokens.logits, params))
    assert (result.n <= draft_tokens.lengths).all()
    assert (result.p[torch.arange(B), result.n].gather(1, result.t[:, None]) > 0).all()


def test_only_a_lenient_verifier_is_biased() -> None:
    exact, lenient = (verification(make_verifier(block, x), SAMPLED) for x in (1.0, 0.5))
    assert exact.bias is None
    given = drafted()
    both = overlap(exact.p, given.q, given.x).where(find_drafted(given.x, given.lengths), 0.0)
    torch.testing.assert_close(exact.beta, both, atol=1e-6, rtol=0)  # sums in another order
    assert (lenient.bias[0] > 0).any() and (lenient.beta >= exact.beta - 1e-12).all()


@pytest.mark.parametrize("lenience", [1.0, 0.5])
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("certain", [False, True])
def test_greedy_rows_among_sampled_ones_are_judged_as_alone(certain, coupled, lenience) -> None:
    if coupled and lenience != 1:
        return  # these two are refused together
    verifier, given = (
        COUPLED_VERIFIER if coupled else make_verifier(block, lenience),
        drafted(certain),
    )
    params = [SAMPLED, GREEDY, SamplingParams(temperature=1.3)]
    for order in ([0, 1, 2], [1, 0, 2], [2, 0, 1]):
        keys, own = [SequenceKey(0, b) for b in order], [params[b] for b in order]
        together = verifier(given.select(order), verifier.draw_class(keys, [5] * B, own))
        for place, b in enumerate(order):
            alone = verifier(
                given.select([b]), verifier.draw_class([SequenceKey(0, b)], [5], [params[b]])
            )
            assert int(together.n[place]) == int(alone.n[0])
            assert int(together.t[place]) == int(alone.t[0])
            assert torch.equal(together.beta[place], alone.beta[0])
            assert torch.equal(together.p[place], probabilities(given.logits[b], params[b]))
            bias = torch.zeros(G).double() if alone.bias is None else alone.bias[0]
            assert torch.equal(together.bias[place], bias)
