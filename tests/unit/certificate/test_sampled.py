"""Continuations whose distribution is known, and numbers watched at every step."""

from __future__ import annotations

import pytest
import torch

from exact.drafters import Certain, FunctionDrafter, RoundedClaim
from foretoken.certificate.sampled_trial import PrefixCells
from foretoken.certificate.watched_drafter import DraftLog, WatchedDrafter
from foretoken.drafters.base import Drafter
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw, SharedDraw
from foretoken.sampling.keys import SequenceKey
from oracle import random_model

SAMPLE = [(1, 2)] * 10 + [(1, 3)] * 5 + [(4, 5)] * 9 + [(6, 7)]


def test_a_text_is_in_the_cell_of_its_longest_frequent_beginning():
    cells = PrefixCells(SAMPLE, share=0.2)  # (), (1,), (1, 2), (1, 3), (4,), (4, 5)
    texts = [(1, 2), (1, 2, 9), (1, 9), (1,), (4, 9), (9, 1), ()]
    assert cells.count(texts).tolist() == [2, 2, 2, 0, 1, 0]
    assert cells.count([]).tolist() == [0] * 6


V, GAMMA = 5, 3
Q = random_model(2, V)


def logged(drafter: Drafter, kind: type[Draw] = Draw) -> DraftLog:
    """Two rows; every step commits one token, whatever was guessed."""
    watched = WatchedDrafter(drafter, seed=0)
    watched.start([0, 1], [[0], [1, 2]], None)
    for step in range(4):
        keys, lengths = [SequenceKey(0, 0), SequenceKey(0, 1)], [1 + step, 2 + step]
        watched.propose([GAMMA, GAMMA], kind(keys, lengths, SamplingParams(1.0)))
        watched.commit([[3], [4]])
    watched.leave([0, 1])
    return watched.log


def test_an_honest_drafter():
    log = logged(FunctionDrafter(Q))
    assert log.num_draft_tokens == sum(len(u.ranked) for u in log.uniforms) == 2 * 4 * GAMMA
    assert log.num_certain == 0 and log.lies == []
    for u in log.uniforms:
        assert bool(((u.by_id >= 0) & (u.by_id < 1)).all()) and u.by_id.dtype == torch.float64


def test_certain_draft_tokens_have_no_numbers():
    log = logged(Certain(Q))
    assert (
        log.num_certain == log.num_draft_tokens == 2 * 4 * GAMMA and log.uniforms == log.lies == []
    )


def test_in_coupled_mode_a_position_counts_once():
    log = logged(FunctionDrafter(Q), SharedDraw)
    assert sum(len(u.ranked) for u in log.uniforms) == 2 * (GAMMA + 3) < log.num_draft_tokens


class Swapper(FunctionDrafter):
    """Draws, and draft tokens the token behind the one drawn."""

    def choose(self, q, i, draw):
        return ((draw(q, i) + 1) % V).tolist()


@pytest.mark.parametrize(
    ("liar", "lie"),
    [
        (Swapper, "was proposed, but"),
        (RoundedClaim, "from another distribution than the q reported"),
    ],
)
def test_lies_are_named(liar, lie):
    assert any(lie in line for line in logged(liar(Q)).lies)
