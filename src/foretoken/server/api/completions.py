"""POST /v1/completions: texts or token ids in, what follows them out."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass
from statistics import fmean
from time import time
from typing import Any

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import Text
from foretoken.server.process.generation import GeneratedText, Generation
from foretoken.server.process.messages import StepOutput, TokenLogprob


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt that is told again: its text, and its first token where tokens are told too."""

    text: str = ""
    first: tuple[TokenLogprob, ...] = ()


def candidates(wishes: Text) -> int:
    """How many texts to write of a prompt."""
    n, best = wishes.n or 1, wishes.best_of
    if best is None:
        return n
    if best < n:
        raise BadRequestError(f"best_of is {best}, below n={n}", "best_of")
    if wishes.stream and best > n:
        raise BadRequestError("best_of does not go with stream", "best_of")
    return best


def options(wishes: Text, facts: dict[str, Any]) -> dict[str, Any]:
    """As keywords of the engine; the best of several are told by their logprobs."""
    parameters = wishes.options(facts)
    if wishes.max_tokens == 0 and (wishes.stream or not wishes.echo):
        message = "max_tokens is 0, which goes with echo and without stream; give 1 or more"
        raise BadRequestError(message, "max_tokens")
    if wishes.echo and wishes.logprobs is not None:
        for name in ("stream", "prompt_logprobs"):
            if getattr(wishes, name) is not None:
                raise BadRequestError(f"echo with logprobs does not go with {name}", name)
        parameters["prompt_logprobs"] = wishes.logprobs
    if wishes.best_of is not None and wishes.best_of > (wishes.n or 1):
        parameters.setdefault("logprobs", 0)
    return parameters


def body(
    wishes: Text, model: str, generation: Generation, echoed: Sequence[Echo]
) -> dict[str, Any]:
    """The whole answer, once all is written."""
    n, choices = wishes.n or 1, list[dict[str, Any]]()
    if wishes.max_tokens == 0:  # what the engine wrote to read the prompt
        for text in generation.texts:
            text.text, text.tokens, text.logprobs = "", [], []
    for at, echo in enumerate(echoed):
        texts = generation.texts[at * generation.n : (at + 1) * generation.n]
        best = sorted(texts, key=_likelihood, reverse=True)[:n] if generation.n > n else texts
        choices += [_choice(wishes, at * n + i, text, echo) for i, text in enumerate(best)]
    answer = _head(answers.fresh("cmpl"), model)
    answer |= {"choices": choices, "usage": answers.usage(generation)}
    answer |= answers.metrics(generation, wishes.speculation.metrics)
    if wishes.speculation.steps:
        steps = [text.steps for text in generation.texts]
        answer["speculation"] = answers.rates(generation.texts) | {"steps": steps}
    return answer


async def events(
    wishes: Text, model: str, generation: Generation, echoed: Sequence[Echo]
) -> AsyncGenerator[str]:
    """Server-sent events: one for each step of each text."""
    head = _head(answers.fresh("cmpl"), model)
    ahead = [len(echoed[i // generation.n].text) for i in range(len(generation.texts))]
    offsets = [*ahead]
    for i in range(len(generation.texts)):
        if echo := echoed[i // generation.n].text:
            yield answers.event(head | {"choices": [_piece(i, echo)]})
    async for i, part in generation.parts():
        if part.text or part.tokens or part.done is not None:
            end = None if part.done is None else ahead[i] + len(generation.texts[i].text)
            chunk = _chunk(wishes, i, part, offsets, end)
            yield answers.event(head | chunk | answers.so_far(wishes, generation))
    if wishes.stream_options is not None and wishes.stream_options.include_usage:
        last: dict[str, Any] = {"choices": [], "usage": answers.usage(generation)}
        last |= answers.metrics(generation, wishes.speculation.metrics)
        if wishes.speculation.steps:
            last["speculation"] = answers.rates(generation.texts)
        yield answers.event(head | last)
    yield answers.DONE


def _likelihood(text: GeneratedText) -> float:
    """Of a text's tokens, the mean logprob."""
    return fmean(each.logprob for each in text.logprobs) if text.logprobs else 0.0


def _head(id: str, model: str) -> dict[str, Any]:
    return {"id": id, "object": "text_completion", "created": int(time()), "model": model}


def _choice(wishes: Text, i: int, text: GeneratedText, echo: Echo) -> dict[str, Any]:
    assert text.done is not None
    whole, prompt_logprobs = echo.text + text.text, text.done.prompt_logprobs or []
    choice = _piece(i, whole, text.done.reason) | {"stop_reason": text.done.stop}
    if wishes.logprobs is not None:
        tokens = [*echo.first, *prompt_logprobs, *text.logprobs] if wishes.echo else text.logprobs
        choice["logprobs"] = _logprobs(tokens, wishes.logprobs, 0, len(whole))
        for key in ("token_logprobs", "top_logprobs") if wishes.echo else ():
            if choice["logprobs"][key]:
                choice["logprobs"][key][0] = None  # nothing is known of a prompt's first token
    if wishes.prompt_logprobs is not None:
        choice["prompt_logprobs"] = answers.read(prompt_logprobs)
    if wishes.return_token_ids:
        choice["token_ids"] = text.tokens
    return choice


def _chunk(
    wishes: Text, i: int, part: StepOutput, offsets: list[int], end: int | None
) -> dict[str, Any]:
    ending = part.done
    choice = _piece(i, part.text, None if ending is None else ending.reason)
    if ending is not None:
        choice["stop_reason"] = ending.stop
    if wishes.logprobs is not None:
        choice["logprobs"] = _logprobs(part.logprobs or [], wishes.logprobs, offsets[i], end)
        offsets[i] += sum(len(each.text) for each in part.logprobs or [])
    if wishes.return_token_ids:
        choice["token_ids"] = part.tokens
    chunk: dict[str, Any] = {"choices": [choice]}
    return chunk | ({"speculation": {"steps": part.steps}} if wishes.speculation.steps else {})


def _piece(i: int, text: str, reason: str | None = None) -> dict[str, Any]:
    return {"index": i, "text": text, "logprobs": None, "finish_reason": reason}


def _logprobs(
    tokens: list[TokenLogprob], count: int, offset: int, end: int | None
) -> dict[str, Any]:
    """`end`: where the text ends, if it is known; tokens behind a stop string that is left out
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
