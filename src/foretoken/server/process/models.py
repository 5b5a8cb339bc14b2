"""Several models of one server: an engine for each name that requests choose by.

Engines of other names are of the base with an adapter merged in; they share nothing.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial

import psutil

from foretoken.server.process.client import State
from foretoken.server.process.fleet import Engines, settle

WORST_FIRST: tuple[State, ...] = ("failed", "restarting", "loading", "draining", "stopped", "ready")
log = logging.getLogger(__name__)


class ServedModels:
    """Engines by the names of their models, that of the base first. They are started one by one:
    each loads, and measures what steps cost, without the next."""

    def __init__(self, engines: Mapping[str, Engines]) -> None:
        self.engines = dict(engines)
        self.base = next(iter(self.engines))
        self.problem = ""  # why the server ends
        self.failed = lambda: None  # called when it does
        self._complete = False  # all have been ready
        self._starting: asyncio.Task[None] | None = None
        for name, engine in self.engines.items():
            engine.failed = partial(self._fail, name)

    def start(self) -> None:
        """Start the engines; all of them are ready when `state` says so."""
        self.engines[self.base].start()
        self._starting = asyncio.create_task(self._rest())

    async def stop(self, patience: float) -> None:
        """Take no new requests; those that run have `patience` seconds to end."""
        if self._starting is not None:
            self._starting.cancel()
        await asyncio.gather(*(engine.stop(patience) for engine in self.engines.values()))

    @property
    def state(self) -> State:
        """The worst state of all."""
        states = {engine.state for engine in self.engines.values()}
        return next(state for state in WORST_FIRST if state in states)

    @property
    def states(self) -> dict[str, int]:
        """The number of engines in each state."""
        return dict(sum((Counter(each.states) for each in self.engines.values()), Counter[str]()))

    async def _rest(self) -> None:
        """Start each of the others once the one before it is ready."""
        for name, engine in self.engines.items():
            if name != self.base:
                engine.start()
            if await settle(engine) == "failed":
                return
            if name == self.base:
                self._log_size()
        self._complete = True

    def _log_size(self) -> None:
        info, others = self.engines[self.base].info, len(self.engines) - 1
        if info is None or not others:
            return
        with suppress(psutil.Error):  # its engine has just died
            size = psutil.Process(info.pid).memory_info().rss / 1e9
            log.info("%s takes %.1f GB of memory, as will each of %s more", self.base, size, others)

    def _fail(self, name: str) -> None:
        """End the server if a model cannot be loaded at first, or no other is left; later the
        others continue without it."""
        if self._complete and any(each.state != "failed" for each in self.engines.values()):
            return
        self.problem = self.engines[name].problem
        self.failed()
