"""v(n) is timed as generation meets it: behind passes of the same size, whatever came before."""

from __future__ import annotations

import pytest
import torch

from foretoken.measurement import measure as module
from foretoken.measurement.measure import passes
from foretoken.request import Request
from foretoken.sampling.keys import RowKey
from oracle import random_model
from table import TableModel

V, LAYOUT, SLACK = 6, 10.0, 16


class Clocked(TableModel):
    """A pass takes 1 s and 1/8 s a token, and LAYOUT more where its size is another than the last.

    Smaller ones are padded to the last size until SLACK tokens were added, as paged attention does.
    """

    now, last, added = 0.0, 0, 0

    def score(self, blocks, need):
        size = len(blocks[0])
        missing = self.last - size
        self.added = self.added + missing if missing > 0 else 0
        padded = missing > 0 and self.added <= SLACK
        self.added = self.added if padded else 0
        length = self.last if padded else size
        self.now += 1 + length / 8 + LAYOUT * (length != self.last)
        self.last = length
        return super().score(blocks, need)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> Clocked:
    model = Clocked(random_model(1, V), V)
    monkeypatch.setattr(module, "perf_counter", lambda: model.now)
    return model


@pytest.mark.parametrize("before", [1, 2, 5, 16, 40])
@pytest.mark.parametrize("repeats", [1, 3])
def test_every_size_in_its_steady_state(target: Clocked, before: int, repeats: int):
    target.last = before
    request = Request([1, 2, 3], 60, RowKey(0, 0))
    times, context = passes(target, request, [1, 2, 3] * 20, 16, repeats)
    assert context == 31
    assert times == [[1 + n / 8] * repeats for n in range(1, 17)]


def test_torch_has_the_threads_that_the_engine_gives_it(monkeypatch: pytest.MonkeyPatch):
    """Else its threads spin on the cores of the target's, in all passes but those of generation."""
    seen: set[int] = set()

    class Elsewhere(TableModel):
        runtime = "openvino"

        def score(self, blocks, need):
            seen.add(torch.get_num_threads())
            return super().score(blocks, need)

    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        passes(Elsewhere(random_model(1, V), V), Request([1], 8, RowKey(0, 0)), [1, 2, 3], 2)
        assert torch.get_num_threads() == 2 and seen == {1}
    finally:
        torch.set_num_threads(before)


def test_as_far_as_the_context_goes(monkeypatch: pytest.MonkeyPatch):
    target = TableModel(random_model(1, V), V, context=9)
    request = Request([1], 8, RowKey(0, 0))
    times, context = passes(target, request, [1, 2, 3, 4], 16)
    assert len(times) == 9 and context == 0
    assert all(len(one) == 1 for one in times)
