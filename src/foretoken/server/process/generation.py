"""One request's texts: several prompts, several texts of each, side by side in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter
from typing import Any

from foretoken.records import StepRecord
from foretoken.server.process.client import RefusedRequest, Told, UnavailableError
from foretoken.server.process.fleet import Engines
from foretoken.server.process.messages import (
    Accepted,
    Done,
    GenerateRequest,
    StepOutput,
    TokenLogprob,
)


@dataclass(slots=True)
class GeneratedText:
    """A text as far as it is written."""

    prompt_tokens: int = 0  # 0 until the engine has accepted its request
    parts: list[StepOutput] = field(default_factory=list[StepOutput])
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    words: dict[int, str] = field(default_factory=dict[int, str])  # of tokens in `steps`
    done: Done | None = None
    echo: str = ""  # the prompt's text, where it is told again
    first: tuple[TokenLogprob, ...] = ()  # and its first token
    tail: str = ""  # the prompt's end, where the reply is read
    prompt_ids: list[int] | None = None  # where they are told

    def add(self, part: StepOutput) -> None:
        self.parts.append(part)
        self.text += part.text
        self.tokens += part.tokens
        self.logprobs += part.logprobs or []
        self.steps += part.steps
        self.words |= part.words or {}
        self.done = part.done


class Generation:
    """The texts of a request, `n` of each prompt: use it within `async with`, whose end frees what
    still runs. Entering it raises what the engine refuses, before anything is written."""

    def __init__(self, engine: Engines, requests: Sequence[GenerateRequest], n: int = 1) -> None:
        self.n = n
        self.predicts = any(request.prediction is not None for request in requests)
        self.texts = [GeneratedText() for _ in requests]
        self.began = perf_counter()
        self.first: float | None = None  # seconds until the first token of any text
        self.gaps: list[float] = []  # seconds between two parts of a text, a token
        self._engine, self._requests = engine, requests
        self._outputs: asyncio.Queue[tuple[int, StepOutput | Exception]] = asyncio.Queue()
        self._answered = asyncio.Event()  # all texts are accepted, or one is refused
        self._problem: Exception | None = None
        self._ends: list[Callable[[], None]] = []
        self._heard = [self.began] * len(self.texts)

    async def __aenter__(self) -> Generation:
        try:
            for i, request in enumerate(self._requests):
                self._ends.append(self._engine.submit(request, partial(self._hear, i)))
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
        """Yield new parts, text by text as they come."""
        unfinished = len(self.texts)
        while unfinished:
            i, part = await self._outputs.get()
            if isinstance(part, Exception):
                raise part
            self._note(i, part)
            unfinished -= part.done is not None
            yield i, part

    async def all(self) -> list[GeneratedText]:
        """The finished texts."""
        async with aclosing(self.parts()) as parts:
            async for _ in parts:
                pass
        return self.texts

    def _hear(self, i: int, message: Told) -> None:
        match message:
            case Accepted(_, prompt_tokens, echo, first, tail, ids):
                text = self.texts[i]
                text.prompt_tokens, text.echo, text.first = prompt_tokens, echo, first
                text.tail, text.prompt_ids = tail, ids
            case StepOutput():
                self._outputs.put_nowait((i, message))
            case RefusedRequest() | UnavailableError():
                self._problem = message
                self._outputs.put_nowait((i, message))
            case _:
                raise AssertionError(message)
        if self._problem is not None or all(text.prompt_tokens for text in self.texts):
            self._answered.set()

    def _note(self, i: int, part: StepOutput) -> None:
        request, statistics = self._requests[i], self._engine.statistics
        self.texts[i].add(part)
        statistics.note(part.steps, plain=request.gamma == 0)
        if part.done is not None and part.done.pace is not None:
            statistics.compare(request, part.done.pace)
        if not part.tokens:
            return
        now = perf_counter()
        if self.first is None:
            self.first = now - self.began
        elif len(self.texts[i].tokens) > len(part.tokens):
            self.gaps.append((now - self._heard[i]) / len(part.tokens))
        self._heard[i] = now

    def _end(self) -> None:
        for end in self._ends:
            end()


def several(
    request: GenerateRequest, prompts: Sequence[str | list[int] | list[dict[str, Any]]], n: int
) -> list[GenerateRequest]:
    """Return the requests for `n` texts of each prompt: text i is the (i % n)th of prompt i // n,
    and is keyed (seed, i), so the same request with the same seed gives the same texts, whatever
    else runs."""
    seed, _ = request.seed
    return [
        replace(request, prompt=prompts[i // n], seed=(seed, i)) for i in range(len(prompts) * n)
    ]
