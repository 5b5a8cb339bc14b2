from __future__ import annotations

import asyncio
from time import perf_counter

import pytest

from foretoken.lab.load.run import run
from foretoken.lab.load.trace import Trace


class Asked:
    """Requests of 10 ms, or of as long as `most` of them take to come; and how many ran at a
    time."""

    def __init__(self, most: int = 0) -> None:
        self.expected = most
        self.running = self.most = 0
        self.sent: list[tuple[int, float]] = []
        self.began = perf_counter()

    async def __call__(self, number: int) -> Trace:
        self.sent.append((number, perf_counter() - self.began))
        self.running += 1
        self.most = max(self.most, self.running)
        while self.most < self.expected:
            await asyncio.sleep(0)
        for _ in range(20 if self.expected else 0):  # any beyond would come meanwhile
            await asyncio.sleep(0)
        await asyncio.sleep(0 if self.expected else 0.01)
        self.running -= 1
        return Trace(end=number)


@pytest.mark.parametrize(("at_once", "most"), [(None, 9), (3, 3), (20, 9)])
def test_so_many_run_at_a_time_and_in_order(at_once: int | None, most: int):
    asked, ended = Asked(most), list[Trace]()
    asyncio.run(run(asked, [0.0] * 9, at_once, ended.append))
    assert asked.most == most and [number for number, _ in asked.sent] == [*range(9)]
    assert sorted(trace.end for trace in ended) == [*range(9)]


def test_none_is_sent_before_it_is_due():
    asked, due, ended = Asked(), [0.0, 0.05, 0.05, 0.12], list[Trace]()
    asyncio.run(run(asked, due, None, ended.append))
    assert len(asked.sent) == 4
    assert all(trace.late > -1e-3 for trace in ended)
    assert all(seconds >= due[number] - 1e-3 for number, seconds in asked.sent)


def test_what_is_held_back_is_late():
    """One request at a time, of 10 ms each: the third is sent 20 ms after it was due."""
    ended = list[Trace]()
    asyncio.run(run(Asked(), [0.0] * 3, 1, ended.append))
    assert ended[1].late >= 0.01 - 1e-3 and ended[2].late >= 0.02 - 2e-3
    assert ended[0].late < ended[1].late < ended[2].late
