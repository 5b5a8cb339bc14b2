"""Appendix A.1: why the token of a position has the distribution p, part by part."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from foretoken.sampling.acceptance_rules import block, speculative
from oracle import random_model

pytestmark = pytest.mark.daily

V = 5
EXACT = 1e-12


@pytest.mark.parametrize("rule", [speculative, block], ids=["speculative", "block"])
@pytest.mark.parametrize("zeros", [0.0, 0.4])
@pytest.mark.parametrize("seed", range(5))
def test_accepted_and_rejected_mass_make_p(seed: int, zeros: float, rule) -> None:
    """P(accepted, x) is min(p, q), P(rejected, x) is p - min(p, q), and the norm is 1 - beta."""
    p, q = (random_model(seed + i, V, zeros)(()) for i in (0, 50))
    after = np.full(V, 1 / V)  # p after the draft token
    distributions = torch.tensor(np.stack([p, after]))[None].expand(V, -1, -1)
    every = torch.arange(V)[:, None]  # row x: the draft token is x
    outcome = rule(
        distributions, torch.tensor(q)[None, None].expand(V, 1, -1), every, torch.ones(V).long()
    )
    keep = outcome.survival[:, 0].numpy()
    residual = outcome.compute_next_distribution(torch.zeros(V, dtype=torch.long)).numpy()

    least = np.minimum(p, q)
    accepted = q * np.where(q > 0, keep, 0.0)
    assert np.abs(accepted - least).max() < EXACT
    rejected = (q * (1 - keep)) @ residual
    assert np.abs(rejected - (p - least)).max() < EXACT
    assert np.abs(accepted + rejected - p).max() < EXACT

    beta = least.sum()
    assert np.abs(residual * (1 - beta) - np.clip(p - q, 0, None)).max() < EXACT
