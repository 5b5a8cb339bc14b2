"""The outputs of one HTTP request, which may have several prompts and several outputs per prompt;
the engine generates all these outputs in one batch."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from functools import partial
from time import perf_counter

from foretoken.records import StepRecord
from foretoken.server.process.client import Notification, RefusedRequest, UnavailableError
from foretoken.server.process.fleet import AnyEngine
from foretoken.server.process.messages import (
    Accepted,
    Done,
    GenerateRequest,
    Prompt,
    StepOutput,
    TokenLogprob,
)


@dataclass(slots=True)
class GeneratedOutput:
    """One output, as far as it has been generated."""

    accepted: Accepted = Accepted(-1, 0)  # 0 prompt tokens until the engine accepts the request
    parts: list[StepOutput] = field(default_factory=list[StepOutput])
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    steps: list[StepRecord] = field(default_factory=list[StepRecord])
    token_texts: dict[int, str] = field(default_factory=dict[int, str])  # of tokens in `steps`
    done: Done | None = None

    def add(self, part: StepOutput) -> None:
        self.parts.append(part)
        self.text += part.text
        self.tokens += part.tokens
        self.logprobs += part.logprobs or []
        self.steps += part.steps
        self.token_texts |= part.token_texts or {}
        self.done = part.done


class Generation:
    """The outputs of a request, `n` for each prompt. `async with` submits a request for each output
    to the engine, raises RefusedRequest or UnavailableError if the engine refuses one, and at the
    end aborts unfinished outputs."""

    def __init__(self, engine: AnyEngine, requests: Sequence[GenerateRequest], n: int = 1) -> None:
        self.n = n
        self.has_prediction = any(request.prediction is not None for request in requests)
        self.outputs = [GeneratedOutput() for _ in requests]
        self.start_time = perf_counter()
        self.first_token_seconds: float | None = None  # seconds until the first token
        # For each part of an output after its first: seconds since the previous part, per token
        self.inter_token_seconds: list[float] = []
        self._engine, self._requests = engine, requests
        self._outputs: asyncio.Queue[tuple[int, StepOutput | Exception]] = asyncio.Queue()
        self._answered = asyncio.Event()  # set when all requests are accepted or one is refused
        self._problem: Exception | None = None
        self._aborts: list[Callable[[], None]] = []
        self._last_part_times = [self.start_time] * len(self.outputs)

    async def __aenter__(self) -> Generation:
        try:
            for i, request in enumerate(self._requests):
                self._aborts.append(self._engine.submit(request, partial(self._handle, i)))
            await self._answered.wait()
            if self._problem is not None:
                raise self._problem
        except BaseException:
            self._abort_all()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        self._abort_all()

    async def stream_parts(self) -> AsyncGenerator[tuple[int, StepOutput]]:
        """Yield (index of the output, `StepOutput`) for each step of each output, as they arrive.
        Raises RefusedRequest or UnavailableError if the engine fails."""
        unfinished = len(self.outputs)
        while unfinished:
            i, part = await self._outputs.get()
            if isinstance(part, Exception):
                raise part
            self._record(i, part)
            unfinished -= part.done is not None
            yield i, part

    async def collect(self) -> list[GeneratedOutput]:
        """Wait until all outputs are finished and return them. Raises like `stream_parts`."""
        async with aclosing(self.stream_parts()) as parts:
            async for _ in parts:
                pass
        return self.outputs

    def _handle(self, i: int, message: Notification) -> None:
        match message:
            case Accepted():
                self.outputs[i].accepted = message
            case StepOutput():
                self._outputs.put_nowait((i, message))
            case RefusedRequest() | UnavailableError():
                self._problem = message
                self._outputs.put_nowait((i, message))
            case _:
                raise AssertionError(message)
        if self._problem is not None or all(each.accepted.prompt_tokens for each in self.outputs):
            self._answered.set()

    def _record(self, i: int, part: StepOutput) -> None:
        self.outputs[i].add(part)
        self._engine.statistics.record(part.steps, plain=self._requests[i].gamma == 0)
        if not part.tokens:
            return
        now = perf_counter()
        if self.first_token_seconds is None:
            self.first_token_seconds = now - self.start_time
        elif len(self.outputs[i].tokens) > len(part.tokens):
            self.inter_token_seconds.append((now - self._last_part_times[i]) / len(part.tokens))
        self._last_part_times[i] = now

    def _abort_all(self) -> None:
        for abort in self._aborts:
            abort()


def expand(request: GenerateRequest, prompts: Sequence[Prompt], n: int) -> list[GenerateRequest]:
    """Return copies of a request for `n` outputs of each prompt. Copy i is for prompt i // n and
    has the seed (seed, i), so that its output does not depend on other requests."""
    seed, _ = request.seed
    return [
        replace(request, prompt=prompts[i // n], seed=(seed, i)) for i in range(len(prompts) * n)
    ]
