"""Numbers of tokens are uniform where the tokens follow their distributions, in both orders."""

from __future__ import annotations

import torch

from foretoken.lab.certificate.odds import binned, uniforms
from foretoken.sampling.distributions import sample

P = torch.tensor([[0.1, 0.6, 0.0, 0.3]])


def test_where_a_token_lies():
    distribution = P.repeat(4, 1)
    values = uniforms(distribution, torch.tensor([0, 1, 2, 3]), torch.full((4,), 0.5).double())
    near = {"atol": 1e-6, "rtol": 0}
    torch.testing.assert_close(values.by_id, torch.tensor([0.05, 0.4, 0.7, 0.85]).double(), **near)
    torch.testing.assert_close(values.ranked, torch.tensor([0.95, 0.3, 1, 0.75]).double(), **near)


def test_ties_share_their_mass():
    values = uniforms(torch.full((2, 4), 0.25), torch.tensor([3, 0]), torch.tensor([0.5, 0.25]))
    assert values.ranked.tolist() == [0.5, 0.25]


def test_drawn_tokens_are_uniform():
    """Fails by chance for two seeds in a million."""
    dice = torch.Generator().manual_seed(0)
    distributions = torch.rand(20_000, 7, generator=dice, dtype=torch.float64) ** 4
    u, noise = torch.rand(2, 20_000, generator=dice, dtype=torch.float64)
    distributions = distributions / distributions.sum(-1, keepdim=True)
    values = uniforms(distributions, sample(distributions, u), noise)
    assert binned("", "", values.ranked, 1e-6).p_value > 1e-6
    assert binned("", "", values.by_id, 1e-6).p_value > 1e-6
    wrong = uniforms(distributions**1.1, sample(distributions, u), noise)
    assert binned("", "", wrong.ranked, 1e-6).p_value < 1e-6
