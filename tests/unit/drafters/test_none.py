"""The drafter that never guesses."""

from foretoken.drafters.base import Draw
from foretoken.drafters.none import NoDrafter
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import RowKey


def test_no_draft_token_whatever_gamma():
    drafter = NoDrafter()
    drafter.start([0, 1], [[1], [2]], None)
    draw = Draw([RowKey(0, 0), RowKey(0, 1)], [1, 1], [SamplingParams()] * 2)
    draft = drafter.propose([4, 7], draw)
    assert draft.tokens.shape == (2, 0)
    assert draft.lengths.tolist() == [0, 0]
    assert draft.q is None and draft.calls == 0
    drafter.commit([[1], [2]])
    drafter.leave([0])
    assert drafter.propose([4], draw).lengths.tolist() == [0]
