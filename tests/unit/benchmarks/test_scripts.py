"""Every script of benchmarks/ can be imported, and the small computations in them."""

from __future__ import annotations

import pytest

from foretoken.costing.costs import Costs
from foretoken.costing.gamma import FixedGamma
from scripts import BENCHMARKS, benchmark


@pytest.mark.parametrize("name", sorted(path.stem for path in BENCHMARKS.glob("*.py")))
def test_a_script_imports(name: str):
    assert benchmark(name).__doc__


def test_a_replay_by_hand():
    """Four tokens: draft tokens at places 0, 2 and 3 are kept, the one at 1 is not, so that two
    steps with a draft token accepted in each make them. A guess costs a tenth of a pass."""
    replay = benchmark("replay")
    costs = Costs(((0, 0.0), (16, 1.6)), ((1, 1.0), (17, 1.0)), ((1, 0.0),))
    text = replay.Text(4, [1.0, 0.0, 1.0, 1.0] + [0.0] * 20, [0.5] * 24)
    seconds, row = replay.replay(FixedGamma(1), text, costs)
    assert [step.accepted for step in row.records] == [1, 1] and seconds == pytest.approx(2.2)
    seconds, row = replay.replay(replay.Oracle(text), text, costs)
    assert [step.drafted for step in row.records] == [1, 1] and seconds == pytest.approx(2.2)
    seconds, row = replay.replay(FixedGamma(2), text, costs)
    assert [step.accepted for step in row.records] == [1, 1] and seconds == pytest.approx(2.3)
