from __future__ import annotations

import asyncio
from time import perf_counter

import pytest

from foretoken.lab.load.run import run
from foretoken.lab.load.trace import Trace


class Asked:
    """Requests of 10 ms, and how many ran at a time."""

    def __init__(self) -> None:
        self.running = self.most = 0
        self.sent: list[tuple[int, float]] = []
        self.began = perf_counter()

    async def __call__(self, number: int) -> Trace:
        self.sent.append((number, perf_counter() - self.began))
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0.01)
        self.running -= 1
        return Trace(end=number)


@pytest.mark.parametrize(("at_once", "most"), [(None, 9), (3, 3), (20, 9)])
def test_so_many_run_at_a_time_and_in_order(at_once: int | None, most: int):
    asked, ended = Asked(), list[Trace]()
    asyncio.run(run(asked, [0.0] * 9, at_once, ended.append))
    assert asked.most == most and [number for number, _ in asked.sent] == [*range(9)]
    assert sorted(trace.end for trace in ended) == [*range(9)]


def test_none_is_sent_before_it_is_due():
    asked, due = Asked(), [0.0, 0.05, 0.05, 0.12]
    asyncio.run(run(asked, due, None, lambda _: None))
    assert len(asked.sent) == 4
    assert all(seconds >= due[number] - 1e-3 for number, seconds in asked.sent)
