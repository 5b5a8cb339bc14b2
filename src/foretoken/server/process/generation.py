"""The outputs of one request: several for each of several prompts, generated together."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from foretoken.records import StepRecord
from foretoken.server.process.client import Notification, RefusedRequest, UnavailableError
from foretoken.server.process.fleet import Engines
from foretoken.server.process.messages import (
    Accepted,
    Done,
    GenerateRequest,
    Prompt,
    StepOutput,
    TokenLogprob,
)


@dataclass(slots=True)
class GeneratedText:
    """An output so far."""

    accepted: Accepted = Accepted(-1, 0)  # no prompt tokens until the engine has the request
    parts: list[StepOutput] = field(default_factory=list[StepOutput])
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    words: dict[int, str] = field(default_factory=dict[int, str])  # of tokens in `steps`
    done: Done | None = None

    def add(self, part: StepOutput) -> None:
        self.parts.append(part)
        self.text += part.text
        self.tokens += part.tokens
        self.logprobs += part.logprobs or []
        self.steps += part.steps
        self.words |= part.words or {}
        self.done = part.done


class Generation:
    """The outputs of a request, `n` for each prompt: use it within `async with`, whose end aborts
    those that still run. Entering it raises the engine's refusal, before anything is generated."""

    def __init__(self, engine: Engines, requests: Sequence[GenerateRequest], n: int = 1) -> None:
        self.n = n
        self.predicts = any(request.prediction is not None for request in requests)
        self.texts = [GeneratedText() for _ in requests]
        self.began = perf_counter()
        self.first: float | None = None  # seconds until the first token
        self.gaps: list[float] = []  # seconds per token between two parts of an output
        self._engine, self._requests = engine, requests
        self._outputs: asyncio.Queue[tuple[int, StepOutput | Exception]] = asyncio.Queue()
        self._answered = asyncio.Event()  # all requests are accepted, or one is refused
        self._problem: Exception | None = None
        self._ends: list[Callable[[], None]] = []
        self._latest = [self.began] * len(self.texts)

    async def __aenter__(self) -> Generation:
        try:
            for i, request in enumerate(self._requests):
                self._ends.append(self._engine.submit(request, partial(self._handle, i)))
            await self._answered.wait()
            if self._problem is not None:
                raise self._problem
        except BaseException:
            self._end()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._end()

    async def parts(self) -> AsyncGenerator[tuple[int, StepOutput]]:
        """Yield new parts as they come, with the index of their output."""
        unfinished = len(self.texts)
        while unfinished:
            i, part = await self._outputs.get()
            if isinstance(part, Exception):
                raise part
            self._note(i, part)
            unfinished -= part.done is not None
            yield i, part

    async def all(self) -> list[GeneratedText]:
        """Return the finished outputs."""
        async with aclosing(self.parts()) as parts:
            async for _ in parts:
                pass
        return self.texts

    def _handle(self, i: int, message: Notification) -> None:
        match message:
            case Accepted():
                self.texts[i].accepted = message
            case StepOutput():
                self._outputs.put_nowait((i, message))
            case RefusedRequest() | UnavailableError():
                self._problem = message
                self._outputs.put_nowait((i, message))
            case _:
                raise AssertionError(message)
        if self._problem is not None or all(text.accepted.prompt_tokens for text in self.texts):
            self._answered.set()

    def _note(self, i: int, part: StepOutput) -> None:
        self.texts[i].add(part)
        self._engine.statistics.note(part.steps, plain=self._requests[i].gamma == 0)
        if not part.tokens:
            return
        now = perf_counter()
        if self.first is None:
            self.first = now - self.began
        elif len(self.texts[i].tokens) > len(part.tokens):
            self.gaps.append((now - self._latest[i]) / len(part.tokens))
        self._latest[i] = now

    def _end(self) -> None:
        for end in self._ends:
            end()


def expand(request: GenerateRequest, prompts: Sequence[Prompt], n: int) -> list[GenerateRequest]:
    """Return the requests for `n` outputs of each prompt: output i is the (i % n)th of prompt
    i // n, and is keyed (seed, i), so the same request with the same seed gives the same outputs,
    whatever else runs."""
    seed, _ = request.seed
    return [
        replace(request, prompt=prompts[i // n], seed=(seed, i)) for i in range(len(prompts) * n)
    ]
