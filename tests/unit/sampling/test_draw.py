"""Draw: which number is used for what, and on which rows it depends."""

from __future__ import annotations

import numpy as np
import torch

from foretoken.sampling.acceptance_rules import speculative
from foretoken.sampling.distributions import SamplingParams, sample
from foretoken.sampling.draw import Draw, SharedDraw
from foretoken.sampling.keys import Purpose, SequenceKey, draw_exponentials, draw_uniform

PARAMS = [SamplingParams(temperature=1.0)] * 3
KEYS = [SequenceKey(1, 0), SequenceKey(1, 1), SequenceKey(9, 0)]
LENGTHS = [4, 7, 4]
DISTRIBUTIONS = torch.rand(3, 1000, generator=torch.manual_seed(0), dtype=torch.float64)


def numbers(offset: int, purpose: Purpose) -> torch.Tensor:
    named = [draw_uniform(key, n, offset, purpose) for key, n in zip(KEYS, LENGTHS, strict=True)]
    return torch.tensor(named, dtype=torch.float64)


def test_a_draft_token_is_drawn_by_the_number_of_its_offset():
    draw = Draw(KEYS, LENGTHS, PARAMS)
    for i in range(3):
        assert torch.equal(draw(DISTRIBUTIONS, i), sample(DISTRIBUTIONS, numbers(i, Purpose.DRAFT)))


def test_the_next_token_has_a_number_of_its_own():
    draw = Draw(KEYS, LENGTHS, PARAMS)
    assert torch.equal(
        draw.draw_next_token(DISTRIBUTIONS), sample(DISTRIBUTIONS, numbers(0, Purpose.NEXT))
    )
    assert not torch.equal(draw.draw_next_token(DISTRIBUTIONS), draw(DISTRIBUTIONS, 0))


def test_how_many_are_kept_has_a_number_of_its_own():
    G = 40
    p = torch.full((3, G + 1, 2), 0.5, dtype=torch.float64)
    q = torch.tensor([0.55, 0.45]).double().expand(3, G, 2)
    x = torch.zeros(3, G, dtype=torch.long)
    outcome = speculative(p, q, x, torch.full((3,), G))
    n = Draw(KEYS, LENGTHS, PARAMS).draw_accepted(outcome)
    assert torch.equal(n, outcome.n(numbers(0, Purpose.ACCEPT)))


def test_shared_draws_are_won_by_the_least_noise_over_mass():
    draw = SharedDraw(KEYS, LENGTHS, PARAMS)
    for i in range(3):
        for b, (key, n) in enumerate(zip(KEYS, LENGTHS, strict=True)):
            expected = np.argmin(draw_exponentials(key, n + i, 1000) / DISTRIBUTIONS[b].numpy())
            assert draw(DISTRIBUTIONS, i)[b] == expected
    assert len(draw.masses) == 9


def test_a_draft_token_and_the_targets_own_token_meet_the_same_noise():
    draw = SharedDraw(KEYS, LENGTHS, PARAMS)
    distributions = torch.stack([DISTRIBUTIONS, DISTRIBUTIONS.flip(1), DISTRIBUTIONS.roll(7, 1)], 1)
    draft_tokens = torch.stack([draw(distributions[:, i], i) for i in range(3)], 1)
    assert torch.equal(draft_tokens, draw.find_winners(distributions))
    later = SharedDraw(KEYS, [n + 2 for n in LENGTHS], PARAMS)
    assert torch.equal(later.find_winners(distributions[:, 2:]), draft_tokens[:, 2:])


def test_shared_draws_never_choose_what_has_no_mass():
    distributions = torch.zeros(3, 1, 1000)
    distributions[:, 0, 500:503] = 1e-38
    assert set(
        SharedDraw(KEYS, LENGTHS, PARAMS).find_winners(distributions).flatten().tolist()
    ) <= {
        500,
        501,
        502,
    }


def test_a_row_meets_the_same_shared_noise_alone_and_with_more_ids():
    together = SharedDraw(KEYS, LENGTHS, PARAMS).find_winners(DISTRIBUTIONS[:, None])
    for b in range(3):
        alone = SharedDraw(KEYS[b : b + 1], LENGTHS[b : b + 1], PARAMS[:1])
        wide = torch.nn.functional.pad(DISTRIBUTIONS[b : b + 1, None], (0, 24))
        assert alone.find_winners(wide).item() == together[b]


def test_behind_other_draft_tokens_numbers_go_on():
    draw = Draw(KEYS, LENGTHS, PARAMS)
    draw.prefetch(2, torch.device("cpu"))
    later = draw.continue_after([[7]] * 3).continue_after([[7], [], [7, 7]])
    values = later(DISTRIBUTIONS, 1)
    plain = Draw(KEYS, LENGTHS, PARAMS)
    expected = [plain(DISTRIBUTIONS, i)[b] for b, i in enumerate([3, 2, 4])]
    assert values.tolist() == [int(token) for token in expected]
    assert len(draw.masses) == 1  # all are looked at
    assert not set(later.derive_keys()) & set(draw.derive_keys())


def test_behind_other_draft_tokens_the_noise_of_coupled_mode_is_that_of_the_position():
    later = SharedDraw(KEYS, LENGTHS, PARAMS).continue_after([[7, 7], [], [7]])
    there = SharedDraw(KEYS, [n + g for n, g in zip(LENGTHS, [2, 0, 1], strict=True)], PARAMS)
    assert torch.equal(later(DISTRIBUTIONS, 1), there(DISTRIBUTIONS, 1))
    assert later.derive_keys() == KEYS
