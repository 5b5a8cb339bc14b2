"""Forced tokens are guesses without a draft; other rows are drafted for as usual."""

from __future__ import annotations

from dataclasses import replace

import torch

from foretoken.drafters.forced import ForcedDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import RowKey
from foretoken.sampling.params import SamplingParams

V = 5


class Forcing:
    """Controls that force some tokens, and shape nothing."""

    V = V

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens

    def shape(self, logits: torch.Tensor, ahead: list[int]) -> torch.Tensor:
        return logits

    def forced(self, ahead: list[int]) -> list[int]:
        return self.tokens[len(ahead) :]


class Asked(UniformDrafter):
    """Remembers what it was asked for."""

    asked: list[int] | None = None

    def propose(self, gamma, draw):
        self.asked = list(gamma)
        return super().propose(gamma, draw)


def proposed(controls: list[Forcing | None], gamma: list[int]):
    B, inner = len(gamma), Asked(V)
    params = [SamplingParams(1.0)] * B
    draw = Draw([RowKey(0, b) for b in range(B)], [3] * B, params, controls)
    return ForcedDrafter(inner).propose(gamma, draw), inner.asked


def test_forced_tokens_come_first_and_cost_nothing() -> None:
    draft, asked = proposed([Forcing([1, 2, 3])], [2])
    assert draft.tokens.tolist() == [[1, 2]] and draft.q is None and asked is None


def test_invalid_logits_of_the_drafter_are_seen_beside_forced_tokens() -> None:
    class Sick(UniformDrafter):
        def propose(self, gamma, draw):
            draft = super().propose(gamma, draw)
            return replace(draft, tops=torch.full(draft.tokens.shape, torch.nan))

    params = [SamplingParams(1.0)] * 2
    draw = Draw([RowKey(0, b) for b in range(2)], [3, 3], params, [Forcing([4, 2]), None])
    draft = ForcedDrafter(Sick(V)).propose([2, 1], draw)
    assert draft.tops is not None
    assert draft.tops.isnan().tolist() == [[False, False], [True, False]]


def test_rows_side_by_side() -> None:
    draft, asked = proposed([Forcing([4]), None, Forcing([])], [3, 2, 1])
    assert asked == [0, 2, 1] and draft.lengths.tolist() == [1, 2, 1]
    assert draft.q is not None
    assert draft.q[0, 0].tolist() == [0, 0, 0, 0, 1]  # certain
    torch.testing.assert_close(draft.q[1], torch.full((2, V), 1 / V).double())


def test_without_any_it_is_the_drafter_itself() -> None:
    draft, asked = proposed([None, Forcing([])], [2, 0])
    assert asked == [2, 0] and draft.lengths.tolist() == [2, 0]


def test_no_guess_is_made_where_none_is_asked() -> None:
    draft, _ = proposed([Forcing([1]), None], [0, 0])
    assert draft.lengths.tolist() == [0, 0]
