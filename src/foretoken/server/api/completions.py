"""POST /v1/completions: texts or token ids in, what follows them out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from statistics import fmean
from time import time
from typing import Any

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import Text
from foretoken.server.engine.messages import Known, Part
from foretoken.server.engine.writing import Writing, Written


def candidates(asked: Text) -> int:
    """How many texts to write of a prompt."""
    n, best = asked.n or 1, asked.best_of
    if best is None:
        return n
    if best < n:
        raise BadRequestError(f"best_of is {best}, below n={n}", "best_of")
    if asked.stream and best > n:
        raise BadRequestError("best_of does not go with stream", "best_of")
    return best


def options(asked: Text, facts: dict[str, Any]) -> dict[str, Any]:
    """As keywords of the engine; the best of several are told by their logprobs."""
    if asked.echo and asked.logprobs is not None:
        raise BadRequestError("echo does not go with logprobs; give prompt_logprobs", "echo")
    wanted = asked.options(facts)
    if asked.best_of is not None and asked.best_of > (asked.n or 1):
        wanted.setdefault("logprobs", 0)
    return wanted


def body(asked: Text, model: str, writing: Writing, echoed: Sequence[str]) -> dict[str, Any]:
    """The whole answer, once all is written. echoed: the prompts as text, or "" for each."""
    n, choices = asked.n or 1, list[dict[str, Any]]()
    for at, echo in enumerate(echoed):
        texts = writing.texts[at * writing.n : (at + 1) * writing.n]
        best = sorted(texts, key=_likelihood, reverse=True)[:n] if writing.n > n else texts
        choices += [_choice(asked, at * n + i, text, echo) for i, text in enumerate(best)]
    answer = _head(answers.fresh("cmpl"), model)
    answer |= {"choices": choices, "usage": answers.usage(writing)}
    if asked.speculation.steps:
        steps = [text.steps for text in writing.texts]
        answer["speculation"] = answers.rates(writing.texts) | {"steps": steps}
    return answer


async def events(
    asked: Text, model: str, writing: Writing, echoed: Sequence[str]
) -> AsyncGenerator[str]:
    """Server-sent events: one for each step of each text."""
    head = _head(answers.fresh("cmpl"), model)
    offsets = [len(echoed[i // writing.n]) for i in range(len(writing.texts))]
    for i in range(len(writing.texts)):
        if echo := echoed[i // writing.n]:
            yield answers.event(head | {"choices": [_piece(i, echo)]})
    async for i, part in writing.parts():
        if part.text or part.tokens or part.done is not None:
            yield answers.event(
                head | _chunk(asked, i, part, offsets) | answers.so_far(asked, writing)
            )
    if asked.stream_options is not None and asked.stream_options.include_usage:
        last: dict[str, Any] = {"choices": [], "usage": answers.usage(writing)}
        if asked.speculation.steps:
            last["speculation"] = answers.rates(writing.texts)
        yield answers.event(head | last)
    yield answers.DONE


def _likelihood(text: Written) -> float:
    """Of a text's tokens, the mean logprob."""
    return fmean(each.logprob for each in text.logprobs) if text.logprobs else 0.0


def _head(id: str, model: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(time()), "model": model}


def _choice(asked: Text, i: int, text: Written, echo: str) -> dict[str, Any]:
    assert text.done is not None
    choice = _piece(i, echo + text.text, text.done.reason) | {"stop_reason": text.done.stop}
    if asked.logprobs is not None:
        choice["logprobs"] = _logprobs(text.logprobs, asked.logprobs, 0)
    if asked.prompt_logprobs is not None:
        given = text.done.prompt_logprobs or []
        choice["prompt_logprobs"] = [None, *map(answers.known, given)]
    if asked.return_token_ids:
        choice["token_ids"] = text.tokens
    return choice


def _chunk(asked: Text, i: int, part: Part, offsets: list[int]) -> dict[str, Any]:
    done = part.done
    choice = _piece(i, part.text, None if done is None else done.reason)
    if done is not None:
        choice["stop_reason"] = done.stop
    if asked.logprobs is not None:
        choice["logprobs"] = _logprobs(part.logprobs or [], asked.logprobs, offsets[i])
        offsets[i] += sum(len(each.text) for each in part.logprobs or [])
    if asked.return_token_ids:
        choice["token_ids"] = part.tokens
    chunk: dict[str, Any] = {"choices": [choice]}
    return chunk | ({"speculation": {"steps": part.steps}} if asked.speculation.steps else {})


def _piece(i: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": i, "text": text, "logprobs": None, "finish_reason": reason}


def _logprobs(tokens: list[Known], count: int, offset: int) -> dict[str, Any]:
    offsets: list[int] = []
    for each in tokens:
        offsets.append(offset)
        offset += len(each.text)
    top = [{text: value for text, _, value in each.top} for each in tokens]
    return {
        "tokens": [each.text for each in tokens],
        "token_logprobs": [each.logprob for each in tokens],
        "top_logprobs": top if count else None,
        "text_offset": offsets,
    }
