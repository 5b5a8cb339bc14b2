"""Figure 5: the blocks are the calls that the steps record, one after the other."""

from __future__ import annotations

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.ends import Ends
from foretoken.models.stock.seq2seq import Seq2SeqModel
from foretoken.speculator import Speculator
from scripts import benchmark
from tiny import t5

script = benchmark("figure5")
GAMMAS = (7, 3, 0)


@pytest.fixture(scope="module")
def done():
    """An encoder-decoder, as in the paper."""
    target, draft = Seq2SeqModel(t5(64)), Seq2SeqModel(t5(64, seed=1))
    spec = Speculator(target, LMDrafter(draft, 64), ends=Ends(decoder_start=0))
    return {
        gamma: spec.generate([[5, 6, 7]], gamma=gamma, max_new_tokens=12)[0] for gamma in GAMMAS
    }


@pytest.mark.parametrize("gamma", GAMMAS)
def test_a_block_for_every_call(done, gamma):
    one, calls = done[gamma], script.timeline(done[gamma])
    kinds = [call.model for call in calls]
    assert kinds[0] == "start" and kinds.count("start") == 1
    assert kinds.count("target") == one.stats.target_calls
    assert kinds.count("draft") == one.stats.draft_calls
    expected = ["start"]
    for step in one.steps:
        expected += ["draft"] * step.draft_calls + ["target"]
    assert kinds == expected


@pytest.mark.parametrize("gamma", GAMMAS)
def test_blocks_follow_one_another_and_fit_into_the_whole(done, gamma):
    calls = script.timeline(done[gamma])
    for one, other in zip(calls, calls[1:], strict=False):
        assert one.at + one.seconds <= other.at + 1e-9
    assert calls[-1].at + calls[-1].seconds <= done[gamma].stats.seconds


def test_the_picture(done, tmp_path):
    script.draw({f"gamma {gamma}": one for gamma, one in done.items()}, tmp_path / "timeline.svg")
    picture = (tmp_path / "timeline.svg").read_text()
    assert picture.startswith("<?xml") and "gamma 7" in picture
