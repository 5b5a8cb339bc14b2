"""Common parts of the answers of all endpoints: usage, rates of speculation, server-sent events."""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import groupby
from time import time
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from foretoken.records import StepRecord
from foretoken.server.api.wire import ApiRequest
from foretoken.server.process.generation import GeneratedText, Generation
from foretoken.server.process.messages import Done, ReplyFacts, StepOutput, TokenLogprob
from foretoken.text.replies.formats import named
from foretoken.text.replies.grammar import Wish
from foretoken.text.replies.reading import (
    ReplyReader,
    Told,
    format_regions,
    template_regions,
    within,
)

Asked = TypeVar("Asked", bound=ApiRequest)
SHOWN = ("predicted", "gamma", "drafted", "accepted", "verify_seconds", "rows")  # of a step
DONE = "data: [DONE]\n\n"


def event(data: Any, name: str | None = None) -> str:
    """A server-sent event."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def fresh(prefix: str) -> str:
    """Return a new id of an answer or a part of one."""
    return f"{prefix}-{uuid4().hex}"


@dataclass(slots=True)
class ToolCall:
    """A call so far."""

    id: str
    index: int
    name: str = ""
    arguments: str = ""

    @property
    def whole(self) -> bool:
        """False if it was cut off."""
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True

    def shown(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def delta(self, told: Told) -> dict[str, Any]:
        """Return what is new of it: its id and name once."""
        if not told.name:
            return {"index": self.index, "function": {"arguments": told.arguments}}
        function = {"name": told.name, "arguments": told.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


class ReplyText:
    """A reply as it is parsed: its text, thoughts and calls."""

    def __init__(self, facts: ReplyFacts | None, wish: Wish | None, tail: str) -> None:
        self.text = self.thoughts = ""
        self.thought_tokens = 0
        self.calls: list[ToolCall] = []
        self._reader = None if facts is None or wish is None else _reader(facts, wish, tail)

    def feed(self, part: StepOutput) -> list[Told]:
        """Return what is new."""
        return join_neighbours(told for _, told in self.read_tokens(part) for told in told)

    def read_tokens(self, part: StepOutput) -> Iterator[tuple[bool, list[Told]]]:
        """Yield the pieces that each token adds, and whether it is a token of thoughts. Tokens are
        parsed one by one, so that nothing depends on the steps that they came in."""
        for i, text in enumerate(part.texts, 1):
            thought = self._thinks
            told = self._feed_text(text, part.done if i == len(part.texts) else None)
            thought = thought or self._thinks
            self.thought_tokens += thought
            yield thought, told

    @property
    def _thinks(self) -> bool:
        return self._reader is not None and self._reader.thinks

    def _feed_text(self, text: str, done: Done | None) -> list[Told]:
        if self._reader is None:
            told = [Told(text)] if text else []
        else:
            told = self._reader.feed(text, last=done is not None, cut=_cut(done))
        for each in told:
            self.text += each.text
            self.thoughts += each.thought
            if each.call is not None:
                if each.call == len(self.calls):
                    self.calls.append(ToolCall(fresh("call"), each.call))
                self.calls[each.call].name += each.name
                self.calls[each.call].arguments += each.arguments
        return told


def join_neighbours(told: Iterable[Told]) -> list[Told]:
    """Return the pieces with neighbours of one kind as one."""
    groups = groupby(told, lambda each: (each.call, bool(each.thought)))
    return [reduce(_join, pieces) for _, pieces in groups]


def _join(one: Told, other: Told) -> Told:
    return Told(
        one.text + other.text,
        one.thought + other.thought,
        one.call,
        one.name + other.name,
        one.arguments + other.arguments,
    )


def _reader(facts: ReplyFacts, wish: Wish, tail: str) -> ReplyReader:
    calls = bool(wish.functions)
    if facts.template is not None and not wish.required:
        regions = template_regions(facts.template, calls=calls)
    else:
        regions = format_regions(named(facts.format), calls=calls, thoughts=facts.thinks)
    functions = {each.name: each for each in wish.functions}
    return ReplyReader(regions, functions, within(regions, tail), has_text=not wish.required)


def _cut(done: Done | None) -> str | None:
    """Return the stop string that cut a reply, or "" for a limit; None if it ended by itself."""
    if done is None or done.reason != "stop":
        return None if done is None else ""
    return done.stop if isinstance(done.stop, str) else None


class Answer(Generic[Asked]):
    """Answer of an endpoint: a whole body at the end, or events until then."""

    def __init__(
        self, asked: Asked, model: str, generation: Generation, facts: ReplyFacts | None = None
    ) -> None:
        """`facts`: how the model's replies are parsed."""
        self.asked, self.model, self.generation, self.facts = asked, model, generation, facts
        self._replies: dict[int, ReplyText] = {}

    def usage(self) -> dict[str, Any]:
        """Return the numbers of tokens."""
        thoughts = sum(reply.thought_tokens for reply in self._replies.values())
        return usage(self.generation, thoughts)

    def reply(self, i: int) -> ReplyText:
        """Return output i as a reply, as far as it has been parsed."""
        if i not in self._replies:
            wish = self.asked.wish(self.facts)
            self._replies[i] = ReplyText(self.facts, wish, self.texts[i].accepted.tail)
        return self._replies[i]

    def finish(self, i: int, done: Done) -> str:
        """Return why output i ended."""
        calls = self._replies[i].calls if i in self._replies else []
        return "tool_calls" if calls and calls[-1].whole and done.reason == "stop" else done.reason

    def body(self) -> dict[str, Any]:
        """Return the whole answer."""
        raise NotImplementedError

    def events(self) -> AsyncGenerator[str]:
        """Yield server-sent events, one for each step of each output."""
        raise NotImplementedError

    @property
    def texts(self) -> list[GeneratedText]:
        return self.generation.texts

    def speculation(self, *, whole: bool = False) -> dict[str, Any]:
        """Return the rates of speculation if asked for; `whole`: with all steps."""
        if not self.asked.speculation.steps:
            return {}
        report = rates(self.texts)
        if whole:
            report["steps"] = [
                [shown_step(step, text.words) for step in text.steps] for text in self.texts
            ]
        return {"speculation": report}


class ChoicesAnswer(Answer[Asked]):
    """Answer of one choice or several: of a chat, or of continuations."""

    prefix: ClassVar[str]  # of its id
    kinds: ClassVar[tuple[str, str]]  # names of it and of a chunk

    def choice(self, i: int, text: GeneratedText) -> dict[str, Any]:
        """Return the fields of output i, at its end."""
        raise NotImplementedError

    def beginning(self, text: GeneratedText) -> dict[str, Any] | None:
        """Return the fields that precede the first step of an output."""
        raise NotImplementedError

    def delta(self, i: int, part: StepOutput) -> dict[str, Any]:
        """Return the fields that a step adds to output i."""
        raise NotImplementedError

    def first(self, text: GeneratedText) -> dict[str, Any]:
        """Return the fields of an output's first chunk other than its choice."""
        return {}

    def body(self) -> dict[str, Any]:
        choices = [
            self._choice(i, self.choice(i, text), text.tokens, text.done)
            for i, text in enumerate(self.texts)
        ]
        answer = self._head(self.kinds[0]) | {"choices": choices, "usage": self.usage()}
        return answer | self.speculation(whole=True)

    async def events(self) -> AsyncGenerator[str]:
        head, options = self._head(self.kinds[1]), self.asked.stream_options
        so_far = options is not None and options.continuous_usage_stats
        for i, text in enumerate(self.texts):
            if (beginning := self.beginning(text)) is not None:
                choices = {"choices": [self._choice(i, beginning, [])]} | self.first(text)
                yield event(head | choices | ({"usage": self.usage()} if so_far else {}))
        async for i, part in self.generation.parts():
            if part.text or part.tokens or part.done is not None:
                chunk: dict[str, Any] = {
                    "choices": [self._choice(i, self.delta(i, part), part.tokens, part.done)]
                }
                if part.words is not None:  # with show_steps
                    steps = [shown_step(step, part.words) for step in part.steps]
                    chunk["speculation"] = {"steps": steps}
                if so_far:
                    chunk["usage"] = self.usage()
                yield event(head | chunk)
        if options is not None and options.include_usage:
            last: dict[str, Any] = {"choices": [], "usage": self.usage()}
            yield event(head | last | self.speculation())
        yield DONE

    def _head(self, kind: str) -> dict[str, Any]:
        id, now = fresh(self.prefix), int(time())
        return {"id": id, "object": kind, "created": now, "model": self.model}

    def _choice(
        self,
        i: int,
        content: dict[str, Any],
        tokens: list[int] | None = None,
        done: Done | None = None,
    ) -> dict[str, Any]:
        choice = {"index": i, "logprobs": None, **content}
        choice["finish_reason"] = None if done is None else self.finish(i, done)
        if done is not None:
            choice["stop_reason"] = done.stop
        if self.asked.return_token_ids and tokens is not None:
            choice["token_ids"] = tokens
        return choice


def usage(generation: Generation, thoughts: int = 0) -> dict[str, Any]:
    """Return the numbers of tokens, the prompt's once for all its outputs; `thoughts`: those of
    reasoning."""
    texts = generation.texts
    read = sum(text.accepted.prompt_tokens for text in texts[:: generation.n])
    written = sum(len(text.tokens) for text in texts)
    steps = [step for text in texts for step in text.steps if step.predicted]
    predicted = steps if generation.predicts else []  # else from the outputs themselves
    cached = [text.done.stats.cached_tokens for text in texts[:: generation.n] if text.done]
    return {
        "prompt_tokens": read,
        "completion_tokens": written,
        "total_tokens": read + written,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(step.accepted for step in predicted),
            "rejected_prediction_tokens": sum(step.drafted - step.accepted for step in predicted),
            "reasoning_tokens": thoughts,
        },
    }


def rates(texts: Sequence[GeneratedText]) -> dict[str, Any]:
    """Return the rates of speculation over all steps of the texts."""
    steps = [step for text in texts for step in text.steps]
    stats = [text.done.stats for text in texts if text.done is not None]
    calls = sum(each.target_calls for each in stats)
    written = sum(len(text.tokens) for text in texts)
    return {
        "target_calls": calls,
        "draft_calls": sum(each.draft_calls for each in stats),
        "drafted": sum(each.drafted for each in stats),
        "accepted": sum(each.accepted for each in stats),
        "tokens_per_call": written / calls if calls else None,
        "acceptance_by_position": [
            sum(step.accepted > i for step in steps) / sum(step.drafted > i for step in steps)
            for i in range(max((step.drafted for step in steps), default=0))
        ],
        "seconds": max((each.seconds for each in stats), default=0.0),
        "target_runtime": stats[0].runtime if stats else None,
        "draft_runtime": stats[0].draft_runtime if stats else None,
    }


def shown_step(step: StepRecord, words: Mapping[int, str]) -> dict[str, Any]:
    """Return a step as the page shows it: its accepted tokens and their source, and the rejected
    ones. `words`: texts of its tokens."""
    last = "plain" if not step.drafted else "bonus"
    if step.accepted < step.drafted:
        last = "corrected"
    sources = ["accepted"] * step.accepted + [last]
    return {
        "tokens": [
            {"id": token, "text": words[token], "source": source}
            for token, source in zip(step.kept, sources, strict=False)
        ],
        "rejected": [
            {"id": token, "text": words[token]} for token in step.guesses[step.accepted :]
        ],
        **{name: getattr(step, name) for name in SHOWN},
        "overlaps": list(step.overlaps),
        "draft_seconds": step.draft_seconds,
        "target_seconds": step.score_seconds,
    }


def known(each: TokenLogprob) -> dict[str, Any]:
    """A token's logprob in the form of chat completions and responses."""
    top = [{"token": t, "logprob": p, "bytes": list(b)} for t, b, p, _ in each.top]
    entry = {"token": each.text, "logprob": each.logprob, "bytes": list(each.bytes)}
    return entry | {"top_logprobs": top}


def by_id(prompt: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Logprobs of a prompt in vLLM's form: at every place the token's own and the most probable
    ones', by their ids; null for the first token, which has none."""
    entries: list[dict[str, Any] | None] = [None]
    for each in prompt:
        entry = {str(each.id): _ranked(each.logprob, each.rank, each.text)}
        top = enumerate(each.top, 1)
        entries.append(
            entry | {str(id): _ranked(value, i, text) for i, (text, _, value, id) in top}
        )
    return entries


def _ranked(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}
