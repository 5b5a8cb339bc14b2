"""One engine of a fleet: the scheduler that serves requests, over models on paper."""

from __future__ import annotations

import math
from dataclasses import dataclass

from foretoken.costing.costs import at
from foretoken.costing.gamma import Adaptive, Fixed, Gamma
from foretoken.engine.scheduler import Scheduler, Task
from foretoken.lab.fleet.paper import PaperDrafter, PaperJudge, PaperTarget, Parts, Text
from foretoken.lab.measurement.result import Serving
from foretoken.request import Request, Row


@dataclass(slots=True)
class Served:
    """A request on its way; in seconds since the first request of all."""

    row: Row
    due: float
    began: float = math.inf  # when its first token was there
    ended: float = math.inf


class Replica:
    """A batch of at most `serving.rows` rows, of requests whose `texts` are known. gamma: a fixed
    number of guesses; None: chosen before every step, as an engine does by itself."""

    def __init__(self, texts: list[Text], serving: Serving, gamma: int | None) -> None:
        parts = Parts(texts, serving)
        target, drafter = PaperTarget(parts), PaperDrafter(parts)
        self.serving, self.clock, self.judge = serving, parts.clock, PaperJudge(parts)
        self.scheduler = Scheduler(target, drafter, serving.rows, clock=self.clock)
        self.gamma: Gamma = Adaptive(serving.costs) if gamma is None else Fixed(gamma)
        self.open: list[Served] = []  # in the order in which they came
        self.busy = 0.0  # seconds in which it had something to do
        self.row_seconds = 0.0  # these, times the rows that ran
        self._last = 0  # requests that ended with the last step

    def submit(self, request: Request, time: float) -> Served:
        """A request that comes now, or while a step runs that began before."""
        if not self.open:
            self.clock.seconds = max(self.clock.seconds, time)
        served = Served(Row.of(request), time)
        self.open.append(served)
        self.scheduler.submit([Task(served.row, self.judge, self.gamma)])
        return served

    def until(self, seconds: float) -> None:
        """Take all steps that begin before then."""
        while self.open and self.clock.seconds < seconds:
            self.step()

    def unfinished(self, seconds: float) -> int:
        """Requests that were not done then, as whoever sends requests knows."""
        return len(self.open) + (self._last if self.clock.seconds > seconds else 0)

    def step(self) -> None:
        """Advance all that run, and note whose first or last token came."""
        start, waiting = self.clock.seconds, len(self.scheduler.waiting)
        self.scheduler.step()
        queued = len(self.scheduler.waiting)
        rows = len(self.open) - queued  # those that have finished since are still there
        around = float(at(self.serving.around, rows)) + (waiting - queued) * self.serving.joining
        self.clock.add(around)
        now = self.clock.seconds
        self.busy, self.row_seconds = (
            self.busy + now - start,
            self.row_seconds + (now - start) * rows,
        )
        for one in self.open:
            if one.row.records:
                one.began = min(one.began, now)
            if one.row.finish_reason is not None:
                one.ended = now
        before = len(self.open)
        self.open = [one for one in self.open if one.row.finish_reason is None]
        self._last = before - len(self.open)
