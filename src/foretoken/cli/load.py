"""A server under load: what it is asked about itself before and after, and one request of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from time import perf_counter, sleep
from typing import TYPE_CHECKING, Any

from foretoken.cli.connection import (
    chunks_of_many,
    connected,
    connected_many,
    get,
    get_bytes,
    message,
    named,
)
from foretoken.cli.remote import facts_of, first_model
from foretoken.cli.reply import TextError
from foretoken.errors import ForetokenError, InputError
from foretoken.lab.load.counters import Counters, counters
from foretoken.lab.load.run import run
from foretoken.lab.load.trace import Trace

if TYPE_CHECKING:
    from httpx2 import AsyncClient

TELLING = ("foretoken", "vllm")  # owners of models whose chunks tell their tokens' ids when asked
PATIENCE = 1.0  # seconds until a server has counted what it has sent


@dataclass(frozen=True, slots=True)
class Server:
    """An address and a key; what is served there, and what ours tells of itself."""

    url: str
    key: str | None
    model: str
    tells_ids: bool
    facts: dict[str, Any]

    def counted(self, least: int = 0) -> Counters | None:
        """What it has counted, once that is `least` tokens or PATIENCE is over; None where it
        does not count."""
        end = perf_counter() + PATIENCE
        with connected(self.url, self.key) as client:
            while True:
                try:
                    counts = counters(get_bytes(client, "/metrics").decode(errors="replace"))
                except ForetokenError:  # it has none
                    return None
                if counts is None or counts.tokens >= least or perf_counter() > end:
                    return counts
                sleep(0.05)


@dataclass(slots=True)
class Load:
    """What is sent to a server, and what has come of it. The first prompt is a warm-up and counts
    nowhere."""

    server: Server
    prompts: Sequence[str | list[int]]
    wishes: dict[str, Any]
    seed: int
    traces: list[Trace] = field(default_factory=list[Trace])
    began: float = 0.0
    ended: float = 0.0  # the last request that is over
    _before: Counters | None = None  # what the server had counted by then

    def run(
        self, times: Sequence[float], at_once: int | None, report: Callable[[Trace], None]
    ) -> float:
        """Seconds that it took, or that it had when Ctrl-C came. InputError where the warm-up
        fails."""
        try:
            asyncio.run(self._run(times, at_once, report))
        except KeyboardInterrupt:
            if not self.began:
                raise
            self.ended = perf_counter()
        return self.ended - self.began

    def guesses(self, tokens: int) -> Counters | None:
        """What the server has counted since the beginning, which is so many tokens or more; None
        where it does not count."""
        if self._before is None:
            return None
        after = self.server.counted(self._before.tokens + tokens)
        return None if after is None else after.since(self._before)

    async def _run(
        self, times: Sequence[float], at_once: int | None, report: Callable[[Trace], None]
    ) -> None:
        def ended(trace: Trace) -> None:
            self.traces.append(trace)
            self.ended = perf_counter()
            report(trace)

        async with connected_many(self.server.url, self.server.key) as client:
            before = self.server.counted()
            first = await self._ask(client, 0)
            if first.failure is not None:
                raise InputError(f"a first request failed ({first.failure[0]}): {first.failure[1]}")
            if before is not None:
                self._before = self.server.counted(before.tokens + (first.tokens or 0))
            self.began = perf_counter()
            await run(lambda number: self._ask(client, number + 1), times, at_once, ended)

    async def _ask(self, client: AsyncClient, number: int) -> Trace:
        trace, start, body = Trace(), perf_counter(), self._body(number)
        try:
            with named(client):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    if response.status_code != 200:
                        await response.aread()
                        trace.failure = str(response.status_code), message(response)
                        return trace
                    async for chunk in chunks_of_many(response):
                        trace.read(chunk, perf_counter() - start)
            trace.close()
        except InputError as error:
            trace.failure = "connection", str(error)
        except (TextError, ValueError) as error:
            trace.failure = "stream", str(error)
        return trace

    def _body(self, number: int) -> dict[str, Any]:
        body: dict[str, Any] = {"model": self.server.model, "stream": True}
        body |= {"stream_options": {"include_usage": True}, **self.wishes}
        body |= {"return_token_ids": True} if self.server.tells_ids else {}
        return body | {"prompt": self.prompts[number], "seed": (self.seed + number) % 2**63}


def server(url: str, key: str | None, model: str | None) -> Server:
    """The server, asked what it is; InputError where it cannot be reached."""
    with connected(url, key) as client:
        model = first_model(client) if model is None else model
        facts = facts_of(client)
        return Server(url, key, model, _tells_ids(get(client, "/v1/models")), facts)


def _tells_ids(listed: dict[str, Any]) -> bool:
    models = listed.get("data")
    entries = models if isinstance(models, list) else []
    return any(isinstance(model, dict) and model.get("owned_by") in TELLING for model in entries)
