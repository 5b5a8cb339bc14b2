"""A choice among drafters: which one drafts for which sequence."""

from __future__ import annotations

import pytest

from foretoken.drafters.choice import DrafterChoice
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.uniform import UniformDrafter
from foretoken.errors import InputError
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.draw import Draw
from foretoken.sampling.keys import SequenceKey
from oracle import random_model
from table import TableModel

V = 5
Q, R = random_model(1, V), random_model(2, V)


def test_each_sequence_has_the_draft_tokens_and_the_distribution_of_its_drafter():
    parts = [LMDrafter(TableModel(Q, V)), LookupDrafter(), LMDrafter(TableModel(R, V))]
    drafter = DrafterChoice(parts)
    drafter.start([0, 1, 2, 3], [[1, 2, 1], [1, 2, 1], [1, 2, 1], [3]], None)
    drafter.chosen = [0, 1, 2]  # the last sequence: the first drafter
    keys = [SequenceKey(0, b) for b in range(4)]
    draft = drafter.propose([2, 2, 1, 0], Draw(keys, [3, 3, 3, 1], [SamplingParams(1.0)] * 4))
    assert draft.lengths.tolist() == [2, 2, 1, 0] and draft.calls == 2
    assert draft.q is not None and draft.tokens[1].tolist() == [2, 1]
    assert draft.q[0, 0].tolist() == pytest.approx(list(Q((1, 2, 1))), abs=1e-6)
    assert draft.q[1].argmax(-1).tolist() == [2, 1] and draft.q[1].amax().item() == 1
    assert draft.q[2, 0].tolist() == pytest.approx(list(R((1, 2, 1))), abs=1e-6)


def test_drafters_of_other_vocabularies():
    with pytest.raises(InputError, match="has a vocabulary of 7 tokens, but another drafter"):
        DrafterChoice([UniformDrafter(V), UniformDrafter(7)])
