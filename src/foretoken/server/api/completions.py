"""POST /v1/completions: texts or token ids in, their continuations out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import time
from typing import Annotated, Any

from pydantic import Field

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import (
    MOST_LOGPROBS,
    MOST_N,
    Flag,
    Predicting,
    Sets,
    Whole,
)
from foretoken.server.process.generation import GeneratedText, Generation
from foretoken.server.process.messages import StepOutput, TokenLogprob


class Text(Predicting):
    """Request to continue texts."""

    prompt: Annotated[str | list[str] | list[Whole] | list[list[Whole]], Sets("prompt")]
    max_tokens: Annotated[Whole | None, Sets("max_new_tokens")] = Field(16, ge=0)
    logprobs: Annotated[Whole | None, Sets("logprobs", "prompt_logprobs")] = Field(
        None, ge=0, le=MOST_LOGPROBS
    )
    echo: Flag | None = None
    best_of: Whole | None = Field(None, ge=1, le=MOST_N)

    @property
    def prompts(self) -> list[str | list[int]]:
        prompt: Any = self.prompt
        several = isinstance(prompt, list) and bool(prompt) and not isinstance(prompt[0], int)
        prompts = prompt if several else [prompt]
        if [] in prompts:
            raise BadRequestError("prompt is empty; give a text or ids", "prompt")
        return prompts

    @property
    def candidates(self) -> int:
        return max(self.n or 1, self.best_of or 1)

    @property
    def max_new_tokens(self) -> int | None:
        return None if self.max_tokens is None else max(1, self.max_tokens)

    @property
    def reported(self) -> int | None:
        """The best of several texts are told by their logprobs."""
        ranked = self.candidates > (self.n or 1)
        return 0 if self.logprobs is None and ranked else self.logprobs

    @property
    def reported_of_prompt(self) -> int | None:
        return self.logprobs if self.echo and self.logprobs is not None else self.prompt_logprobs

    def require(self) -> None:
        n, best = self.n or 1, self.best_of
        if best is not None and best < n:
            raise BadRequestError(f"best_of is {best}, below n={n}", "best_of")
        if best is not None and self.stream and best > n:
            raise BadRequestError("best_of does not go with stream", "best_of")
        super().require()
        if self.max_tokens == 0 and (self.stream or not self.echo):
            message = "max_tokens is 0, which goes with echo and without stream; give 1 or more"
            raise BadRequestError(message, "max_tokens")
        if self.echo and self.logprobs is not None:
            for name in ("stream", "prompt_logprobs"):
                if getattr(self, name) is not None:
                    raise BadRequestError(f"echo with logprobs does not go with {name}", name)


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is told again: its text, and its first token where tokens are told too."""

    text: str = ""
    first: tuple[TokenLogprob, ...] = ()


class TextAnswer(answers.Answer[Text]):
    """Answer of continuations, each after the echo of its prompt."""

    def __init__(
        self, asked: Text, model: str, generation: Generation, echoes: Sequence[Echo]
    ) -> None:
        super().__init__(asked, model, generation)
        self.echoes = echoes

    def body(self) -> dict[str, Any]:
        n, count = self.asked.n or 1, self.generation.n
        if self.asked.max_tokens == 0:  # what the engine wrote to read the prompt
            for text in self.texts:
                text.text, text.tokens, text.logprobs = "", [], []
        choices: list[dict[str, Any]] = []
        for at, echo in enumerate(self.echoes):
            texts = self.texts[at * count : (at + 1) * count]
            best = sorted(texts, key=_likelihood, reverse=True)[:n] if count > n else texts
            choices += [self._choice(at * n + i, text, echo) for i, text in enumerate(best)]
        answer = self._head() | {"choices": choices, "usage": self.usage()}
        return answer | self.metrics() | self.speculation(whole=True)

    async def events(self) -> AsyncGenerator[str]:
        head, texts = self._head(), self.texts
        echoes = [self.echoes[i // self.generation.n].text for i in range(len(texts))]
        offsets = [len(echo) for echo in echoes]
        for i, echo in enumerate(echoes):
            if echo:
                yield answers.event(head | {"choices": [_piece(i, echo)]})
        async for i, part in self.generation.parts():
            if part.text or part.tokens or part.done is not None:
                end = None if part.done is None else len(echoes[i]) + len(texts[i].text)
                chunk = self._chunk(i, part, offsets, end)
                yield answers.event(head | chunk | self.usage_so_far())
        if self.tells_usage:
            last: dict[str, Any] = {"choices": [], "usage": self.usage()}
            yield answers.event(head | last | self.metrics() | self.speculation())
        yield answers.DONE

    def _head(self) -> dict[str, Any]:
        id, kind = answers.fresh("cmpl"), "text_completion"
        return {"id": id, "object": kind, "created": int(time()), "model": self.model}

    def _choice(self, i: int, text: GeneratedText, echo: Echo) -> dict[str, Any]:
        asked = self.asked
        assert text.done is not None
        whole, prompt_logprobs = echo.text + text.text, text.done.prompt_logprobs or []
        choice = _piece(i, whole, text.done.reason) | {"stop_reason": text.done.stop}
        if asked.logprobs is not None:
            tokens = (
                [*echo.first, *prompt_logprobs, *text.logprobs] if asked.echo else text.logprobs
            )
            choice["logprobs"] = _logprobs(tokens, asked.logprobs, 0, len(whole))
            for key in ("token_logprobs", "top_logprobs") if asked.echo else ():
                if choice["logprobs"][key]:
                    choice["logprobs"][key][0] = None  # nothing is known of a prompt's first token
        if asked.prompt_logprobs is not None:
            choice["prompt_logprobs"] = answers.read(prompt_logprobs)
        if asked.return_token_ids:
            choice["token_ids"] = text.tokens
        return choice

    def _chunk(
        self, i: int, part: StepOutput, offsets: list[int], end: int | None
    ) -> dict[str, Any]:
        ending = part.done
        choice = _piece(i, part.text, None if ending is None else ending.reason)
        if ending is not None:
            choice["stop_reason"] = ending.stop
        if self.asked.logprobs is not None:
            told = part.logprobs or []
            choice["logprobs"] = _logprobs(told, self.asked.logprobs, offsets[i], end)
            offsets[i] += sum(len(each.text) for each in told)
        if self.asked.return_token_ids:
            choice["token_ids"] = part.tokens
        return {"choices": [choice]} | self.steps_of(part)


def _likelihood(text: GeneratedText) -> float:
    """The mean logprob of a text's tokens."""
    return fmean(each.logprob for each in text.logprobs) if text.logprobs else 0.0


def _piece(i: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": i, "text": text, "logprobs": None, "finish_reason": reason}


def _logprobs(
    tokens: list[TokenLogprob], count: int, offset: int, end: int | None
) -> dict[str, Any]:
    """`end`: where the text ends, if it is known; tokens after a stop string that is left out
    stand there."""
    offsets: list[int] = []
    for each in tokens:
        offsets.append(offset if end is None else min(offset, end))
        offset += len(each.text)
    # the token itself is told too where it is not among the likeliest
    singles = ({each.text: each.logprob} for each in tokens)
    likeliest = ({text: value for text, _, value, _ in each.top} for each in tokens)
    top = [one | others for one, others in zip(singles, likeliest, strict=True)]
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": top if count else None,
        "text_offset": offsets,
    }
