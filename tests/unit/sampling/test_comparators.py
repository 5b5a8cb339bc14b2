"""The comparators' acceptance probabilities are what the formulas say, and never above beta."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretoken import theory
from foretoken.sampling.comparators import COMPARATORS, match, rejection

V = 5
FORMULAS = {"match": theory.match_beta, "rejection": theory.rejection_beta}


def distributions(count: int = 40) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(5)
    pairs = rng.gamma(0.7, size=(count, 2, V)) + 1e-3
    pairs[0, 1] = pairs[0, 0]
    pairs[1, 1, 2] = 0.0  # p can give it and q cannot
    pairs[2, 0, 2] = 0.0
    pairs /= pairs.sum(-1, keepdims=True)
    return [(p, q) for p, q in pairs]


@pytest.mark.parametrize("rule", COMPARATORS)
def test_the_acceptance_is_the_formulas(rule):
    one = torch.tensor([1])
    for p, q in distributions():
        both = torch.tensor(np.array([[p, p]]))
        accept = [
            float(COMPARATORS[rule](both, torch.tensor(q)[None, None], x, one).survival)
            for x in torch.arange(V).reshape(V, 1, 1)
        ]
        assert q @ accept == pytest.approx(FORMULAS[rule](p, q), abs=1e-12)
        assert FORMULAS[rule](p, q) <= theory.beta(p, q) + 1e-12  # appendix A.2


def test_a_certain_draft_token():
    """Matching keeps it with p(x); rejection only where p is certain too."""
    p = torch.tensor([[[0.5, 0.3, 0.2]] * 2, [[0.0, 1.0, 0.0]] * 2])
    x, lengths = torch.tensor([[1], [1]]), torch.tensor([1, 1])
    np.testing.assert_allclose(match(p, None, x, lengths).survival, [[0.3], [1.0]], atol=1e-7)
    assert rejection(p, None, x, lengths).survival.tolist() == [[0.0], [1.0]]
