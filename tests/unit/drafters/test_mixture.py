"""Drafters by position: who guesses where, told what, and under whose distribution."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from foretoken.costing import stored_costs
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.mixture import KnownTokensDrafter, MixtureDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import random_model
from table import TableModel

V = 5
Q, R = random_model(1, V), random_model(2, V)
SAMPLED = SamplingParams(temperature=1.0)


def draw(lengths: list[int], params: SamplingParams = SAMPLED) -> Draw:
    return Draw([SequenceKey(0, b) for b in range(len(lengths))], lengths, [params] * len(lengths))


def lm(distribution) -> LMDrafter:
    return LMDrafter(TableModel(distribution, V))


def test_invalid_logits_of_a_part_are_seen_by_row():
    sick = MixtureDrafter(
        [(LookupDrafter(), 1), (lm(lambda text: [float("nan")] * V if 3 in text else Q(text)), 2)]
    )
    sick.start([0, 1], [[1, 2, 1], [3, 4]], None)
    draft = sick.propose([3, 3], draw([3, 2]))
    assert draft.lengths.tolist() == [3, 2] and draft.tops is not None
    assert draft.tops.isnan().tolist() == [[False] * 3, [True, True, False]]
    assert MixtureDrafter([(LookupDrafter(), 1)]).propose([], draw([])).tops is None


def test_without_a_distribution_all_draft_tokens_are_certain():
    drafter = MixtureDrafter([(LookupDrafter(), 1), (LookupDrafter(), 1)])
    drafter.start([0], [[1, 2, 1]], None)
    draft = drafter.propose([4], draw([3]))
    assert draft.q is None and draft.tokens.tolist() == [[2, 1]] and draft.calls == 0
    quiet = drafter.propose([0], draw([3]))
    assert quiet.q is None and quiet.tokens.shape == (1, 0)


@pytest.mark.parametrize("counts", [[], [0], [None, 2], [1, -1], [1.5], ["2"], [True]])
def test_counts(counts):
    with pytest.raises(InputError, match="numbers of draft tokens are .*; give 1 or more"):
        MixtureDrafter([(UniformDrafter(V), n) for n in counts])


@pytest.mark.parametrize("parts", [None, 3, [LookupDrafter()], [(LookupDrafter(),)], ["ab"]])
def test_parts_are_pairs(parts):
    with pytest.raises(InputError, match="^parts is .*; give a list of pairs"):
        MixtureDrafter(parts)


def test_parts_that_do_not_fit():
    with pytest.raises(
        InputError, match="has a vocabulary of 7 tokens, but another part of .* has 5"
    ):
        MixtureDrafter([(LookupDrafter(), 1), (UniformDrafter(V), 1), (UniformDrafter(7), None)])
    assert MixtureDrafter([(LookupDrafter(), 1)]).vocab_size is None
    assert stored_costs.make_identity(MixtureDrafter([(LookupDrafter(), 1)])) is None
    assert MixtureDrafter([(LookupDrafter(), 1), (lm(Q), 1)]).runtime == "python+table"


# Draft tokens that rows have without a drafter


class Asked(UniformDrafter):
    """Remembers what it was asked for."""

    asked: list[int] | None = None

    def propose(self, gamma, draw):
        self.asked = list(gamma)
        return super().propose(gamma, draw)


def proposed(given: list[list[int]], gamma: list[int], predicted: frozenset[int] = frozenset()):
    inner = Asked(V)
    draft = KnownTokensDrafter(inner, given, predicted).propose(gamma, draw([3] * len(gamma)))
    return draft, inner.asked


def test_given_tokens_cost_nothing() -> None:
    draft, budgets = proposed([[1, 2]], [2], frozenset({0}))
    assert draft.tokens.tolist() == [[1, 2]] and draft.q is None and budgets is None
    assert draft.predicted == {0} and not draft.calls


def test_invalid_logits_of_the_drafter_are_seen_beside_given_tokens() -> None:
    class Sick(UniformDrafter):
        def propose(self, gamma, draw):
            draft = super().propose(gamma, draw)
            return replace(draft, tops=torch.full(draft.tokens.shape, torch.nan))

    draft = KnownTokensDrafter(Sick(V), [[4, 2], []]).propose([2, 1], draw([3, 3]))
    assert draft.tops is not None
    assert draft.tops.isnan().tolist() == [[False, False], [True, False]]


def test_rows_side_by_side() -> None:
    draft, budgets = proposed([[4], [], []], [3, 2, 1], frozenset({0}))
    assert budgets == [0, 2, 1] and draft.lengths.tolist() == [1, 2, 1]
    assert draft.q is not None and draft.predicted == {0}
    assert draft.q[0, 0].tolist() == [0, 0, 0, 0, 1]  # certain
    torch.testing.assert_close(draft.q[1], torch.full((2, V), 1 / V).double())
