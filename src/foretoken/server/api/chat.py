"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import time
from typing import Any

from foretoken.server.api import answers
from foretoken.server.api.wire import Chat
from foretoken.server.process.generation import GeneratedText, Generation
from foretoken.server.process.messages import StepOutput


def body(wishes: Chat, model: str, generation: Generation) -> dict[str, Any]:
    """The whole answer, once all is written."""
    choices = [_choice(wishes, i, text) for i, text in enumerate(generation.texts)]
    answer = _head(answers.fresh("chatcmpl"), model, "chat.completion")
    answer |= {"choices": choices, "usage": answers.usage(generation)}
    return answer | _extra(wishes, generation, whole=True)


async def events(wishes: Chat, model: str, generation: Generation) -> AsyncGenerator[str]:
    """Server-sent events: one for each step of each text."""
    head = _head(answers.fresh("chatcmpl"), model, "chat.completion.chunk")
    for i in range(len(generation.texts)):
        yield answers.event(head | {"choices": [_delta(i, {"role": "assistant", "content": ""})]})
    async for i, part in generation.parts():
        if part.text or part.tokens:
            chunk = _chunk(wishes, i, part) | answers.so_far(wishes, generation)
            yield answers.event(head | chunk)
        if part.done is not None:
            end = _delta(i, {}, part.done.reason) | {"stop_reason": part.done.stop}
            yield answers.event(head | {"choices": [end]})
    if wishes.stream_options is not None and wishes.stream_options.include_usage:
        last = {"choices": [], "usage": answers.usage(generation)}
        yield answers.event(head | last | _extra(wishes, generation))
    yield answers.DONE


def _head(id: str, model: str, kind: str) -> dict[str, Any]:
    return {"id": id, "object": kind, "created": int(time()), "model": model}


def _choice(wishes: Chat, i: int, text: GeneratedText) -> dict[str, Any]:
    assert text.done is not None
    choice: dict[str, Any] = {
        "index": i,
        "message": {"role": "assistant", "content": text.text, "refusal": None},
        "logprobs": _logprobs(text.logprobs) if wishes.logprobs else None,
        "finish_reason": text.done.reason,
        "stop_reason": text.done.stop,
    }
    if wishes.return_token_ids:
        choice["token_ids"] = text.tokens
    return choice


def _chunk(wishes: Chat, i: int, part: StepOutput) -> dict[str, Any]:
    choice = _delta(i, {"content": part.text})
    if wishes.logprobs:
        choice["logprobs"] = _logprobs(part.logprobs or [])
    if wishes.return_token_ids:
        choice["token_ids"] = part.tokens
    chunk: dict[str, Any] = {"choices": [choice]}
    return chunk | ({"speculation": {"steps": part.steps}} if wishes.speculation.steps else {})


def _delta(i: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}


def _logprobs(tokens: list[Any]) -> dict[str, Any]:
    return {"content": [answers.known(each) for each in tokens], "refusal": None}


def _extra(wishes: Chat, generation: Generation, *, whole: bool = False) -> dict[str, Any]:
    """What only those get who ask for it."""
    extra = answers.metrics(generation, wishes.speculation.metrics)
    if wishes.speculation.steps:
        extra["speculation"] = answers.rates(generation.texts)
        if whole:
            extra["speculation"]["steps"] = [text.steps for text in generation.texts]
    ending = generation.texts[0].done
    if wishes.prompt_logprobs is not None and ending is not None:
        extra["prompt_logprobs"] = answers.read(ending.prompt_logprobs or [])
    return extra
