"""Coupled draws: the distributions of draft token and token, and how often they are the same.

The seeds are fixed. On other seeds a test here would fail by chance once in a million times.
"""

from __future__ import annotations

import pytest
import torch
from scipy import stats

from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw, SharedDraw
from foretoken.sampling.keys import SequenceKey
from foretoken.theory import beta, match_probability

N, ALPHA = 20_000, 1e-6
P = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0], dtype=torch.float64)
Q = torch.tensor([0.1, 0.3, 0.1, 0.3, 0.2], dtype=torch.float64)


def draws(kind: type[Draw]) -> tuple[list[int], list[int]]:
    """Guess and token of N rows, at different positions."""
    keys = [SequenceKey(11, b) for b in range(N)]
    draw = kind(keys, [b % 7 for b in range(N)], SamplingParams(temperature=1.0))
    draft_tokens = draw(Q.expand(N, -1), 0)
    own = draw.find_winners(P.expand(N, 1, -1))[:, 0] if isinstance(draw, SharedDraw) else None
    tokens = draw.draw_next_token(P.expand(N, -1)) if own is None else own
    return draft_tokens.tolist(), tokens.tolist()


def test_draft_token_and_token_have_their_distributions():
    for drawn, distribution in zip(draws(SharedDraw), (Q, P), strict=True):
        counts = [drawn.count(i) for i in range(5) if distribution[i]]
        assert sum(counts) == N
        assert stats.chisquare(counts, [N * w for w in distribution.tolist() if w]).pvalue > ALPHA


@pytest.mark.parametrize(("kind", "right"), [(SharedDraw, True), (Draw, False)])
def test_they_match_as_often_as_the_formula_says(kind, right):
    """The negative control draws them apart: then they match with sum p q."""
    matches = sum(a == b for a, b in zip(*draws(kind), strict=True))
    expected = match_probability(P, Q)
    assert float((P * Q).sum()) + 0.1 < expected < beta(P, Q)
    p_value = stats.binomtest(matches, N, expected).pvalue
    assert p_value > ALPHA if right else p_value < 1e-50
