"""Code that the answers of several endpoints share: usage, speculation rates, parsed replies, and
server-sent events."""

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
from foretoken.server.api.protocol import ApiRequest
from foretoken.server.process.generation import GeneratedOutput, Generation
from foretoken.server.process.messages import Done, ReplyFacts, StepOutput, TokenLogprob
from foretoken.text.replies.formats import get_format
from foretoken.text.replies.grammar import ReplyRequirements
from foretoken.text.replies.reader import (
    ReplyEvent,
    ReplyReader,
    build_format_regions,
    build_template_regions,
    find_open_region,
)

RequestT = TypeVar("RequestT", bound=ApiRequest)
STEP_FIELDS = ("predicted", "gamma", "drafted", "accepted", "verify_seconds", "rows")
DONE_EVENT = "data: [DONE]\n\n"


def format_event(data: Any, name: str | None = None) -> str:
    """Return `data` as the JSON of a server-sent event; `name`: the event's type, if any."""
    head = f"event: {name}\n" if name else ""
    return f"{head}data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def make_id(prefix: str) -> str:
    """Return a new random id, such as "chatcmpl-..." for the prefix "chatcmpl"."""
    return f"{prefix}-{uuid4().hex}"


@dataclass(slots=True)
class ToolCall:
    """A tool call of a reply, as far as it has been generated."""

    id: str
    index: int
    name: str = ""
    arguments: str = ""

    @property
    def is_complete(self) -> bool:
        """Return whether the arguments are complete JSON."""
        try:
            json.loads(self.arguments)
        except ValueError:
            return False
        return True

    def to_dict(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}

    def build_delta(self, event: ReplyEvent) -> dict[str, Any]:
        """Return an event of this call as a delta of a streamed chat completion. Only the first
        delta of a call contains the call's id and name."""
        if not event.name:
            return {"index": self.index, "function": {"arguments": event.arguments}}
        function = {"name": event.name, "arguments": event.arguments}
        return {"index": self.index, "id": self.id, "type": "function", "function": function}


class ParsedReply:
    """A reply that is parsed into text, reasoning (`thoughts`) and tool calls as it is generated.

    If `facts` (the format of the model's replies) or `requirements` is None, everything is text.
    `tail` is the end of the prompt, which may already open the reasoning.
    """

    def __init__(
        self, facts: ReplyFacts | None, requirements: ReplyRequirements | None, tail: str
    ) -> None:
        self.text = self.thoughts = ""
        self.thought_tokens = 0
        self.calls: list[ToolCall] = []
        self._reader = (
            None
            if facts is None or requirements is None
            else _make_reader(facts, requirements, tail)
        )

    def feed(self, part: StepOutput) -> list[ReplyEvent]:
        """Parse the output of one step; return its events, with adjacent events of the same kind
        joined."""
        return join_adjacent(event for _, events in self.parse_tokens(part) for event in events)

    def parse_tokens(self, part: StepOutput) -> Iterator[tuple[bool, list[ReplyEvent]]]:
        """Parse the output of one step. Yield, for each token, whether the token belongs to the
        reasoning, and the token's events. Tokens are parsed one by one so that the result does not
        depend on how many tokens each step committed."""
        for i, text in enumerate(part.texts, 1):
            thought = self._is_thinking
            events = self._feed_text(text, part.done if i == len(part.texts) else None)
            thought = thought or self._is_thinking
            self.thought_tokens += thought
            yield thought, events

    @property
    def _is_thinking(self) -> bool:
        return self._reader is not None and self._reader.thinks

    def _feed_text(self, text: str, done: Done | None) -> list[ReplyEvent]:
        if self._reader is None:
            events = [ReplyEvent(text)] if text else []
        else:
            events = self._reader.feed(text, last=done is not None, cut=_get_cut(done))
        for each in events:
            self.text += each.text
            self.thoughts += each.thought
            if each.call is not None:
                if each.call == len(self.calls):
                    self.calls.append(ToolCall(make_id("call"), each.call))
                self.calls[each.call].name += each.name
                self.calls[each.call].arguments += each.arguments
        return events


def join_adjacent(events: Iterable[ReplyEvent]) -> list[ReplyEvent]:
    """Join adjacent events that continue the same text, reasoning or call."""
    groups = groupby(events, lambda each: (each.call, bool(each.thought)))
    return [reduce(_join, pieces) for _, pieces in groups]


def _join(one: ReplyEvent, other: ReplyEvent) -> ReplyEvent:
    return ReplyEvent(
        one.text + other.text,
        one.thought + other.thought,
        one.call,
        one.name + other.name,
        one.arguments + other.arguments,
    )


def _make_reader(facts: ReplyFacts, requirements: ReplyRequirements, tail: str) -> ReplyReader:
    calls = bool(requirements.functions)
    if facts.template is not None and not requirements.required:
        regions = build_template_regions(facts.template, calls=calls)
    else:
        regions = build_format_regions(get_format(facts.format), calls=calls, thoughts=facts.thinks)
    functions = {each.name: each for each in requirements.functions}
    return ReplyReader(
        regions, functions, find_open_region(regions, tail), has_text=not requirements.required
    )


def _get_cut(done: Done | None) -> str | None:
    """Return the stop string that cut off a reply, or "" if a length limit cut it off; None if the
    reply continues or was not cut off."""
    if done is None or done.reason != "stop":
        return None if done is None else ""
    return done.stop if isinstance(done.stop, str) else None


class Answer(Generic[RequestT]):
    """An endpoint's answer to a request, either one body at the end or a stream of events."""

    def __init__(
        self, request: RequestT, model: str, generation: Generation, facts: ReplyFacts | None = None
    ) -> None:
        """`model`: the served model's name. `facts`: the format of the model's replies; None while
        the model is loading."""
        self.request, self.model, self.generation, self.facts = request, model, generation, facts
        self._replies: dict[int, ParsedReply] = {}

    def get_usage(self) -> dict[str, Any]:
        """Return the answer's `usage` object, the token counts."""
        thoughts = sum(reply.thought_tokens for reply in self._replies.values())
        return compute_usage(self.generation, thoughts)

    def get_reply(self, i: int) -> ParsedReply:
        """Return the parser of output i, with the parts of the reply parsed so far."""
        if i not in self._replies:
            requirements = self.request.get_reply_requirements(self.facts)
            self._replies[i] = ParsedReply(self.facts, requirements, self.outputs[i].accepted.tail)
        return self._replies[i]

    def get_finish_reason(self, i: int, done: Done) -> str:
        """Return the finish reason of output i: "tool_calls" if the output ended after a complete
        call, otherwise "stop" or "length"."""
        calls = self._replies[i].calls if i in self._replies else []
        return (
            "tool_calls"
            if calls and calls[-1].is_complete and done.reason == "stop"
            else done.reason
        )

    def build_body(self) -> dict[str, Any]:
        """Return the JSON body of the complete answer."""
        raise NotImplementedError

    def stream_events(self) -> AsyncGenerator[str]:
        """Yield the answer as server-sent events, as the outputs are generated."""
        raise NotImplementedError

    @property
    def outputs(self) -> list[GeneratedOutput]:
        return self.generation.outputs

    def summarize_speculation(self, *, with_steps: bool = False) -> dict[str, Any]:
        """Return {"speculation": rates} if the request sets `speculation.steps`, else {}.
        `with_steps`: also include a description of every step."""
        if not self.request.speculation.steps:
            return {}
        report = compute_rates(self.outputs)
        if with_steps:
            report["steps"] = [
                [describe_step(step, output.token_texts) for step in output.steps]
                for output in self.outputs
            ]
        return {"speculation": report}


class ChoicesAnswer(Answer[RequestT]):
    """Answer with a list of choices, one for each output: a chat completion or a completion."""

    id_prefix: ClassVar[str]
    object_names: ClassVar[tuple[str, str]]  # field `object` of the answer and of a chunk

    def build_choice(self, i: int, output: GeneratedOutput) -> dict[str, Any]:
        """Return the choice of the finished output i, without the fields that all endpoints
        have."""
        raise NotImplementedError

    def build_first_delta(self, output: GeneratedOutput) -> dict[str, Any] | None:
        """Return the choice in the chunk before an output's first step, like `build_delta`; None if
        no such chunk is sent."""
        raise NotImplementedError

    def build_delta(self, i: int, part: StepOutput) -> dict[str, Any]:
        """Return the choice in the chunk for a step of output i, without the fields that all
        endpoints have."""
        raise NotImplementedError

    def build_first_fields(self, output: GeneratedOutput) -> dict[str, Any]:
        """Return additional top-level fields of an output's first chunk."""
        return {}

    def build_body(self) -> dict[str, Any]:
        choices = [
            self._complete_choice(i, self.build_choice(i, output), output.tokens, output.done)
            for i, output in enumerate(self.outputs)
        ]
        answer = self._build_head(self.object_names[0]) | {
            "choices": choices,
            "usage": self.get_usage(),
        }
        return answer | self.summarize_speculation(with_steps=True)

    async def stream_events(self) -> AsyncGenerator[str]:
        head, options = self._build_head(self.object_names[1]), self.request.stream_options
        continuous_usage = options is not None and options.continuous_usage_stats
        for i, output in enumerate(self.outputs):
            if (first_delta := self.build_first_delta(output)) is not None:
                choices = {
                    "choices": [self._complete_choice(i, first_delta, [])]
                } | self.build_first_fields(output)
                yield format_event(
                    head | choices | ({"usage": self.get_usage()} if continuous_usage else {})
                )
        async for i, part in self.generation.stream_parts():
            if part.text or part.tokens or part.done is not None:
                chunk: dict[str, Any] = {
                    "choices": [
                        self._complete_choice(i, self.build_delta(i, part), part.tokens, part.done)
                    ]
                }
                if part.token_texts is not None:  # with show_steps
                    steps = [describe_step(step, part.token_texts) for step in part.steps]
                    chunk["speculation"] = {"steps": steps}
                if continuous_usage:
                    chunk["usage"] = self.get_usage()
                yield format_event(head | chunk)
        if options is not None and options.include_usage:
            last: dict[str, Any] = {"choices": [], "usage": self.get_usage()}
            yield format_event(head | last | self.summarize_speculation())
        yield DONE_EVENT

    def _build_head(self, kind: str) -> dict[str, Any]:
        id, now = make_id(self.id_prefix), int(time())
        return {"id": id, "object": kind, "created": now, "model": self.model}

    def _complete_choice(
        self,
        i: int,
        content: dict[str, Any],
        tokens: list[int] | None = None,
        done: Done | None = None,
    ) -> dict[str, Any]:
        choice = {"index": i, "logprobs": None, **content}
        choice["finish_reason"] = None if done is None else self.get_finish_reason(i, done)
        if done is not None:
            choice["stop_reason"] = done.stop
        if self.request.return_token_ids and tokens is not None:
            choice["token_ids"] = tokens
        return choice


def compute_usage(generation: Generation, thought_tokens: int = 0) -> dict[str, Any]:
    """Return the `usage` object of an answer, with token counts. A prompt with several outputs
    counts once. `thought_tokens`: the number of reasoning tokens."""
    outputs = generation.outputs
    prompt_tokens = sum(output.accepted.prompt_tokens for output in outputs[:: generation.n])
    new_tokens = sum(len(output.tokens) for output in outputs)
    steps = [step for output in outputs for step in output.steps if step.predicted]
    # Without a prediction in the request, these draft tokens come from the sequence or grammar
    predicted = steps if generation.has_prediction else []
    cached = [each.done.stats.cached_tokens for each in outputs[:: generation.n] if each.done]
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": new_tokens,
        "total_tokens": prompt_tokens + new_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(cached)},
        "completion_tokens_details": {
            "accepted_prediction_tokens": sum(step.accepted for step in predicted),
            "rejected_prediction_tokens": sum(step.drafted - step.accepted for step in predicted),
            "reasoning_tokens": thought_tokens,
        },
    }


def compute_rates(texts: Sequence[GeneratedOutput]) -> dict[str, Any]:
    """Return the speculation statistics over all steps of the outputs, such as the acceptance rate
    at each draft position. Some values are None if no output is finished."""
    steps = [step for text in texts for step in text.steps]
    stats = [text.done.stats for text in texts if text.done is not None]
    calls = sum(each.target_calls for each in stats)
    new_tokens = sum(len(text.tokens) for text in texts)
    return {
        "target_calls": calls,
        "draft_calls": sum(each.draft_calls for each in stats),
        "drafted": sum(each.drafted for each in stats),
        "accepted": sum(each.accepted for each in stats),
        "tokens_per_call": new_tokens / calls if calls else None,
        "acceptance_by_position": [
            sum(step.accepted > i for step in steps) / sum(step.drafted > i for step in steps)
            for i in range(max((step.drafted for step in steps), default=0))
        ],
        "seconds": max((each.seconds for each in stats), default=0.0),
        "target_runtime": stats[0].runtime if stats else None,
        "draft_runtime": stats[0].draft_runtime if stats else None,
    }


def describe_step(step: StepRecord, token_texts: Mapping[int, str]) -> dict[str, Any]:
    """Return a step as JSON for `speculation.steps`: its new tokens, each marked as accepted,
    corrected, bonus or plain, its rejected draft tokens, and its times. `token_texts` maps token
    ids to their text."""
    last = "plain" if not step.drafted else "bonus"
    if step.accepted < step.drafted:
        last = "corrected"
    sources = ["accepted"] * step.accepted + [last]
    return {
        "tokens": [
            {"id": token, "text": token_texts[token], "source": source}
            for token, source in zip(step.new_tokens, sources, strict=False)
        ],
        "rejected": [
            {"id": token, "text": token_texts[token]}
            for token in step.draft_tokens[step.accepted :]
        ],
        **{name: getattr(step, name) for name in STEP_FIELDS},
        "overlaps": list(step.overlaps),
        "draft_seconds": step.draft_seconds,
        "target_seconds": step.score_seconds,
    }


def format_logprob(token: TokenLogprob) -> dict[str, Any]:
    """Return a token's logprob in the format of chat completions and responses."""
    top = [{"token": t, "logprob": p, "bytes": list(b)} for t, b, p, _ in token.top]
    entry = {"token": token.text, "logprob": token.logprob, "bytes": list(token.bytes)}
    return entry | {"top_logprobs": top}


def format_prompt_logprobs(prompt: Sequence[TokenLogprob]) -> list[dict[str, Any] | None]:
    """Return a prompt's logprobs in vLLM's format: for each position a dict from token ids to the
    logprobs of the prompt's token and of the most probable tokens. The first token has no logprob,
    so its entry is None."""
    entries: list[dict[str, Any] | None] = [None]
    for each in prompt:
        entry = {str(each.id): _format_ranked(each.logprob, each.rank, each.text)}
        top = enumerate(each.top, 1)
        entries.append(
            entry | {str(id): _format_ranked(value, i, text) for i, (text, _, value, id) in top}
        )
    return entries


def _format_ranked(logprob: float, rank: int, text: str) -> dict[str, Any]:
    return {"logprob": logprob, "rank": rank, "decoded_token": text}
