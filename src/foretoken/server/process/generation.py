"""One request's texts: several prompts, several texts of each, side by side in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from foretoken.server.process.fleet import Engines
from foretoken.server.process.messages import Done, StepOutput, TokenLogprob

Said = tuple[int, int | StepOutput | Exception]  # of which text


@dataclass(slots=True)
class GeneratedText:
    """A text as far as it is written."""

    prompt_tokens: int = 0
    text: str = ""
    tokens: list[int] = field(default_factory=list[int])
    logprobs: list[TokenLogprob] = field(default_factory=list[TokenLogprob])
    steps: list[dict[str, Any]] = field(default_factory=list[dict[str, Any]])
    done: Done | None = None

    def add(self, part: StepOutput) -> None:
        self.text += part.text
        self.tokens += part.tokens
        self.logprobs += part.logprobs or []
        self.steps += part.steps
        self.done = part.done


class Generation:
    """The texts of a request: use it within `async with`, whose end frees what still runs.

    Text i is the (i % n)th of prompt i // n, and is keyed (seed, i): the same request with the same
    seed gives the same texts, whatever else runs.
    """

    def __init__(
        self, engine: Engines, prompts: Sequence[Any], n: int, options: dict[str, Any], seed: int
    ) -> None:
        self.n, self.predicts = n, "prediction" in options
        self.texts = [GeneratedText() for _ in range(len(prompts) * n)]
        self.began = perf_counter()
        self.first: float | None = None  # seconds until the first token of any text
        self.gaps: list[float] = []  # seconds between two parts of a text, a token
        self._engine, self._prompts, self._options, self._seed = engine, prompts, options, seed
        self._inbox: asyncio.Queue[Said] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []
        self._early: list[Said] = []
        self._heard = [self.began] * len(self.texts)

    async def __aenter__(self) -> Generation:
        """Raises what the engine refuses, before anything is written."""
        self._tasks = [asyncio.create_task(self._write(i)) for i in range(len(self.texts))]
        try:
            while not all(text.prompt_tokens for text in self.texts):
                i, message = await self._inbox.get()
                if isinstance(message, Exception):
                    raise message
                if isinstance(message, int):
                    self.texts[i].prompt_tokens = message
                else:
                    self._early.append((i, message))
        except BaseException:
            await self._stop()
            raise
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._stop()

    async def parts(self) -> AsyncGenerator[tuple[int, StepOutput]]:
        """What is written, text by text as it comes."""
        unfinished = len(self.texts)
        while unfinished:
            i, part = self._early.pop(0) if self._early else await self._inbox.get()
            if isinstance(part, Exception):
                raise part
            assert isinstance(part, StepOutput)
            self._note(i, part)
            unfinished -= part.done is not None
            yield i, part

    async def all(self) -> list[GeneratedText]:
        """The finished texts."""
        async with aclosing(self.parts()) as parts:
            async for _ in parts:
                pass
        return self.texts

    def _note(self, i: int, part: StepOutput) -> None:
        self.texts[i].add(part)
        if not part.tokens:
            return
        now = perf_counter()
        if self.first is None:
            self.first = now - self.began
        elif len(self.texts[i].tokens) > len(part.tokens):
            self.gaps.append((now - self._heard[i]) / len(part.tokens))
        self._heard[i] = now

    async def _write(self, i: int) -> None:
        prompt = self._prompts[i // self.n]
        options = self._options | {"seed": (self._seed, i)}
        try:
            async with aclosing(self._engine.submit(prompt, options)) as messages:
                async for message in messages:
                    self._inbox.put_nowait((i, message))
        except Exception as error:
            self._inbox.put_nowait((i, error))

    async def _stop(self) -> None:
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
