"""Many streams at a time over a few connections: what is asked, and what each stream brought.

200 texts are asked for at a time over 64 connections of HTTP/1.1, which carry one response each: so
every request asks for three texts or four, and their chunks share its stream.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from random import Random
from time import perf_counter
from typing import Any

import httpx2

CONNECTIONS, STREAMS = 64, 200
PROMPT, NEW = (4, 96), (16, 160)  # tokens of a prompt and of what follows it, from least to most
SILENCE = 120.0  # seconds
DONE = "[DONE]"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: text i continues prompt i and is keyed (seed, i)."""

    seed: int
    prompts: list[list[int]]
    max_tokens: int
    temperature: float
    ignore_eos: bool

    def body(self, model: str) -> dict[str, Any]:
        return {
            "model": model,
            "prompt": self.prompts,
            "max_tokens": self.max_tokens,
            "temperature": self.temperature,
            "top_p": 1.0,  # a model's own suggestions are not followed
            "top_k": 0,
            "seed": self.seed,
            "ignore_eos": self.ignore_eos,
            "speculation": {"rule": "coupled"},
            "stream": True,
            "stream_options": {"include_usage": True},
            "return_token_ids": True,
        }


def requests(count: int, vocabulary: int, seed: int) -> list[Asked]:
    """The same for the same seed: one in two at temperature 1, one in two to its full length; any
    64 that follow each other ask for 200 texts."""
    dice, queries = Random(f"requests {seed}"), list[Asked]()
    for number in range(count):
        texts = STREAMS // CONNECTIONS + (number % CONNECTIONS < STREAMS % CONNECTIONS)
        prompts = [_ids(dice, vocabulary) for _ in range(texts)]
        kind = dice.randrange(4)
        length = dice.randint(*NEW)
        queries.append(Asked(seed + number, prompts, length, float(kind % 2), bool(kind // 2)))
    return queries


def _ids(dice: Random, vocabulary: int) -> list[int]:
    return [dice.randrange(100, vocabulary) for _ in range(dice.randint(*PROMPT))]


@dataclass(slots=True)
class Trace:
    """When the tokens of one text came, in seconds since its request was sent."""

    arrivals: list[float] = field(default_factory=list[float])  # of chunks with tokens
    counts: list[int] = field(default_factory=list[int])  # their tokens
    end: float = 0.0
    finish_reason: str | None = None

    def read(self, choice: dict[str, Any], seconds: float) -> None:
        """The next chunk, and when it came."""
        self.end = seconds
        self.finish_reason = choice.get("finish_reason") or self.finish_reason
        if ids := choice["token_ids"]:
            self.arrivals.append(seconds)
            self.counts.append(len(ids))

    @property
    def ttft(self) -> float | None:
        return self.arrivals[0] if self.arrivals else None

    def gaps(self, *, each: bool = False) -> list[float]:
        """Between chunks; `each`: between tokens, a chunk of k being k gaps of a k-th each. Tokens
        that came with the first one have no gap."""
        between = [late - early for early, late in pairwise(self.arrivals)]
        if not each:
            return between
        return [gap / k for gap, k in zip(between, self.counts[1:], strict=True) for _ in range(k)]


@dataclass(slots=True)
class Heard:
    """What a request brought. `failure`: why its stream is not whole, "" where it is."""

    asked: Asked
    traces: list[Trace]  # of its texts
    tokens: list[list[int]]
    sent: float = 0.0  # by the clock of the run
    ended: float = 0.0
    prompt_tokens: int = 0
    completion_tokens: int = 0
    failure: str = ""

    def read(self, chunk: dict[str, Any], seconds: float) -> None:
        """The next chunk, and when it came."""
        for choice in chunk["choices"]:
            i = choice["index"]
            self.traces[i].read(choice, seconds)
            self.tokens[i] += choice["token_ids"]
        if usage := chunk.get("usage"):
            self.prompt_tokens = usage["prompt_tokens"]
            self.completion_tokens = usage["completion_tokens"]

    def close(self, *, done: bool) -> None:
        """The stream is over; done: whether it said so."""
        if not done:
            self.failure = f"the stream ends without {DONE}"
        elif unended := sum(trace.finish_reason is None for trace in self.traces):
            self.failure = f"{unended} texts have no end"
        elif (count := sum(map(len, self.tokens))) != self.completion_tokens:
            self.failure = f"{count} tokens came, {self.completion_tokens} stand in the usage"
        elif (total := sum(map(len, self.asked.prompts))) != self.prompt_tokens:
            self.failure = f"prompts of {total} tokens are {self.prompt_tokens} in the usage"
        elif long := [x for x in self.tokens if len(x) > self.asked.max_tokens]:
            self.failure = f"a text of {len(long[0])} tokens, {self.asked.max_tokens} were asked"
        elif self.asked.ignore_eos and min(map(len, self.tokens)) < self.asked.max_tokens:
            self.failure = "a text ended early"


def fresh(query: Asked) -> Heard:
    texts = range(len(query.prompts))
    return Heard(query, [Trace() for _ in texts], [[] for _ in texts])


@dataclass(slots=True)
class Run:
    """All requests over so many connections, each of which carries them one after another."""

    url: str
    model: str
    asked: Sequence[Asked]
    seconds: float
    heard: list[Heard] = field(default_factory=list[Heard])

    async def all(self) -> float:
        """Over and over until `seconds` are over, but each once at least; how long it took."""
        limits = httpx2.Limits(max_connections=CONNECTIONS, max_keepalive_connections=CONNECTIONS)
        timeout = httpx2.Timeout(SILENCE)
        start = perf_counter()
        async with httpx2.AsyncClient(base_url=self.url, limits=limits, timeout=timeout) as client:
            async with asyncio.TaskGroup() as group:
                for first in range(CONNECTIONS):
                    group.create_task(self._connection(client, first, start))
        return perf_counter() - start

    async def _connection(self, client: httpx2.AsyncClient, number: int, start: float) -> None:
        while number < len(self.asked) or perf_counter() < start + self.seconds:
            answer = fresh(self.asked[number % len(self.asked)])
            answer.sent = perf_counter() - start
            await self._ask(client, answer)
            answer.ended = perf_counter() - start
            self.heard.append(answer)
            number += CONNECTIONS

    async def _ask(self, client: httpx2.AsyncClient, answer: Heard) -> None:
        start, ended, body = perf_counter(), False, answer.asked.body(self.model)
        try:
            async with client.stream("POST", "/v1/completions", json=body) as response:
                if response.status_code != 200:
                    detail = (await response.aread()).decode(errors="replace")
                    answer.failure = f"{response.status_code}: {detail[:300]}"
                    return
                async for event in httpx2.EventSource(response):
                    if ended:
                        raise ValueError(f"more follows {DONE}")
                    if ended := event.data == DONE:
                        continue
                    answer.read(json.loads(event.data), perf_counter() - start)
            answer.close(done=ended)
        except (httpx2.HTTPError, ValueError, KeyError, IndexError, TypeError) as error:
            answer.failure = f"{type(error).__name__}: {error}"[:300]
