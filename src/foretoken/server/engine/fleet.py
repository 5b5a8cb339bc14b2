"""Several engines as one: who takes a request, what becomes of it when its engine dies, and what
all of them come to. Where an engine runs is not known here.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from foretoken.server.engine.ledger import together
from foretoken.server.engine.link import Link, RefusedRequest, State, UnavailableError
from foretoken.server.engine.messages import Part
from foretoken.server.engine.prefixes import Prefixes, digests
from foretoken.server.engine.process import Child
from foretoken.server.engine.worker import Setup

MOVES = 3  # engines that a text may lose: one that ends them itself is not to end all
WAIT = 300.0  # seconds that a text waits for an engine, where all are being started again
TICK = 0.05  # seconds between two looks for one
SHARE = 0.5  # of a prompt: an engine that has read as much is preferred
SLACK = 4  # texts that it may then write more than the one with fewest
log = logging.getLogger(__name__)


class Fleet:
    """`count` engines behind one link's face. The first is started alone: what steps cost is
    measured there, undisturbed, and the others are given it."""

    def __init__(self, setup: Setup, begin: Callable[[Setup], Child], count: int) -> None:
        self.setup, self._begin = setup, begin
        self.problem = ""  # why it failed
        self.failed = lambda: None  # called where one of the first engines cannot be started
        self._links = [self._new_link() for _ in range(count)]
        self._leaving: list[Link] = []  # which take no more texts
        self._gone = Counter[str]()  # what those did that have left
        self._prefixes = Prefixes()
        self._end: State | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self) -> None:
        """Start the engines; one of them is ready when `state` says so."""
        self._links[0].start()
        self._do(self._rest())

    async def stop(self, patience: float) -> None:
        """No new requests; those that run may end within so many seconds."""
        if self._end is not None:
            return
        self._end = "draining"
        for task in self._tasks:
            task.cancel()
        links = [*self._links, *self._leaving]
        await asyncio.gather(*(link.stop(patience) for link in links))
        self._end = "stopped"

    def scale(self, count: int, patience: float) -> None:
        """So many engines from now on. Those that are too many take no more texts and end with
        those they have; what is left of them after so many seconds goes on elsewhere."""
        assert count > 0
        while len(self._links) < count:
            self._links.append(link := self._new_link())
            link.start()
        while len(self._links) > count:
            link = min(reversed(self._links), key=lambda link: (link.state == "ready", link.open))
            self._links.remove(link)
            self._leaving.append(link)
            self._do(self._drained(link, patience))

    @property
    def state(self) -> State:
        if self._end is not None:
            return self._end
        if self.problem:
            return "failed"
        states = {link.state for link in self._links}
        best: tuple[State, ...] = ("ready", "loading", "restarting", "failed")
        return next(state for state in best if state in states or state == "failed")

    @property
    def states(self) -> dict[str, int]:
        """How many engines are in each state."""
        return dict(Counter(link.state for link in [*self._links, *self._leaving]))

    @property
    def facts(self) -> dict[str, Any]:
        facts = [link.facts for link in self._links if link.state == "ready"]
        return facts[0] if facts else self._links[0].facts

    @property
    def running(self) -> int:
        return self._sum("running")

    @property
    def waiting(self) -> int:
        return self._sum("waiting")

    @property
    def preempted(self) -> int:
        return self._sum("preempted")

    @property
    def restarts(self) -> int:
        return self._sum("restarts")

    async def submit(self, prompt: Any, options: dict[str, Any]) -> AsyncGenerator[int | Part]:
        """As a link's; where the engine dies the text goes on in another one."""
        steps, shown, started = list[dict[str, Any]](), 0, False
        for moves_left in reversed(range(MOVES + 1)):
            link = await self._taking(prompt, options, wait=started)
            wishes = options | ({"begun": (steps, shown)} if steps else {})
            try:
                async with aclosing(link.submit(prompt, wishes)) as messages:
                    async for message in messages:
                        if isinstance(message, Part):
                            steps, shown = [*steps, *message.steps], shown + len(message.text)
                        elif started:
                            continue
                        started = True
                        yield message
                return
            except RefusedRequest as error:
                if error.kind != "dead" or self._end is not None or not moves_left:
                    raise
                log.warning("a text of %s steps goes on in another engine", len(steps))

    async def ask(self, name: str, **arguments: Any) -> Any:
        """An answer that takes no step; of the speculation, that of all engines together."""
        if name == "speculation":
            ready = [link for link in self._links if link.state == "ready"]
            outcomes = await asyncio.gather(
                *(link.ask("ledger") for link in ready), return_exceptions=True
            )
            answers = [each for each in outcomes if not isinstance(each, BaseException)]
            if answers:
                return together(answers) | {"running": self.running, "waiting": self.waiting}
        link = await self._taking("", {}, wait=False)
        return await link.ask(name, **arguments)

    async def _taking(self, prompt: Any, options: dict[str, Any], *, wait: bool) -> Link:
        """The engine for a request, which is noted to read it."""
        prefix = digests(prompt, options)
        for _ in range(int(WAIT / TICK) if wait else 1):
            ready = [link for link in self._links if link.state == "ready"]
            if ready and self.state == "ready":
                link = self._nearest(ready, prefix)
                self._prefixes.note(_name(link), prefix)
                return link
            if wait and self.state not in ("loading", "restarting"):
                break
            await asyncio.sleep(TICK if wait else 0)
        problem = f": {self.problem}" if self.problem else ""
        raise UnavailableError(f"no engine is ready ({self.state}){problem}", 2)

    def _nearest(self, ready: list[Link], prefix: list[int]) -> Link:
        """Where most of a prompt has been read, if that is much of it and others have not far less
        to do; else where there is least to do."""
        least = min(ready, key=lambda link: link.open)
        near = [link for link in ready if link.open <= least.open + SLACK]
        read = {id(link): self._prefixes.known(_name(link), prefix) for link in near}
        best = max(near, key=lambda link: (read[id(link)], -link.open))
        return best if read[id(best)] > SHARE * len(prefix) else least

    async def _rest(self) -> None:
        """Start the others once the first is ready."""
        first, *others = self._links
        while first.state in ("loading", "restarting"):
            await asyncio.sleep(TICK)
        if first.state != "ready":  # it cannot be started, nor could they
            return
        self.setup = replace(self.setup, costs=first.facts.get("costs"))
        first.setup = self.setup
        for link in others:
            link.setup = self.setup
            link.start()
        while any(link.state == "loading" for link in self._links):
            await asyncio.sleep(TICK)
        for link in self._links:
            link.failed = lambda: None  # from now on the others go on without it

    async def _drained(self, link: Link, patience: float) -> None:
        await link.stop(patience)
        self._leaving.remove(link)
        for name in ("preempted", "restarts"):
            self._gone[name] += getattr(link, name)

    def _new_link(self) -> Link:
        link = Link(self.setup, self._begin)
        link.failed = lambda: self._fail(link)
        return link

    def _fail(self, link: Link) -> None:
        self.problem = link.problem
        self.failed()

    def _sum(self, name: str) -> int:
        links = [*self._links, *self._leaving]
        return self._gone[name] + sum(getattr(link, name) for link in links)

    def _do(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _name(link: Link) -> tuple[int, int]:
    """An engine by what it has read: one that was started again has read nothing."""
    return id(link), link.restarts


Engines = Link | Fleet
