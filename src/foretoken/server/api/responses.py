"""POST /v1/responses: OpenAI's later form of a chat, without what it stores."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from itertools import count
from time import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from foretoken.server.api import answers, items
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import (
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_METADATA,
    ApiRequest,
    Flag,
    NamedTool,
    Templated,
    Whole,
    Wire,
)
from foretoken.server.process.messages import StepOutput

LOGPROBS = "message.output_text.logprobs"


def _items(content: Any) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


class Format(Wire):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class TextOptions(Wire):
    format: Format = Format()  # pyright: ignore[reportCallIssue]
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(Wire):
    effort: str | None = None
    summary: Literal["auto"] | None = None  # thoughts are returned whole
    generate_summary: None = None


class Responses(Templated):
    """Request for a response."""

    input: Annotated[
        Annotated[list[items.Item], Field(min_length=1, max_length=MOST_MESSAGES)],
        BeforeValidator(_items, json_schema_input_type=str | list[items.Item]),
    ]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = Field(None, max_length=16)
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    truncation: Literal["disabled"] | None = None
    background: Flag | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MOST_METADATA)
    reasoning: ReasoningOptions | None = None

    sets: ClassVar[dict[str, tuple[str, ...]]] = {
        **ApiRequest.sets,
        "prompt": ("input",),
        "max_new_tokens": ("max_output_tokens",),
        "logprobs": ("top_logprobs",),
        "structured": ("text.format", "structured_outputs", "tools"),
        "chat_template_kwargs": ("tools", "chat_template_kwargs", "reasoning"),
        "reasoning_effort": ("reasoning.effort",),
    }

    @property
    def prompts(self) -> list[list[dict[str, Any]]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [[*system, *items.messages(self.input)]]

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def reported(self) -> int | None:
        told = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if told else None

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    def require(self) -> None:
        """Refuse, too, what the other endpoints take and a response has no place for."""
        foreign = {
            "n": (self.n or 1) > 1,
            "return_token_ids": self.return_token_ids,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "background": self.background,
        }
        if not items.messages(self.input):
            raise BadRequestError("input has no message; give one", "input")
        for name, asked in foreign.items():
            if asked:
                raise BadRequestError(f"a response has no {name}; leave it out", name)
        kind, schema, field = self.form
        if schema is not None and kind != "json_schema":
            problem = f"{field} has the type {kind}, which reads no schema"
            raise BadRequestError(f"{problem}; give the type json_schema", field)
        super().require()

    @property
    def form(self) -> tuple[str, Any, str]:
        asked = self.text.format if self.text else Format()  # pyright: ignore[reportCallIssue]
        return asked.type, asked.json_schema, "text.format"


class ResponseAnswer(answers.Answer[Responses]):
    """Answer to a request for a response."""

    def body(self) -> dict[str, Any]:
        (text,) = self.texts
        told = items.OutputItems(lambda *_, **__: "")  # without events
        for part in text.parts:
            list(self._events(told, part))
        list(told.end(self._status, has_text=not self.asked.forced))
        return self._finished(self._head(), told.items)

    async def events(self) -> AsyncGenerator[str]:
        """Yield typed server-sent events, numbered."""
        numbers, head = count(), self._head()

        def event(kind: str, **data: Any) -> str:
            return answers.event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        yield event("response.created", response=head)
        yield event("response.in_progress", response=head)
        told = items.OutputItems(event)
        async for _, part in self.generation.parts():
            for each in self._events(told, part):
                yield each
        for each in told.end(self._status, has_text=not self.asked.forced):
            yield each
        response = self._finished(head, told.items)
        yield event(f"response.{response['status']}", response=response)

    def _events(self, told: items.OutputItems, part: StepOutput) -> Iterator[str]:
        """Yield the events of each token: thoughts have no logprobs."""
        logprobs: list[dict[str, Any]] = []
        if self.asked.reported is not None:
            logprobs = [answers.known(each) for each in part.logprobs or ()]
        for i, (thought, new) in enumerate(self.reply(0).read_tokens(part)):
            yield from told.told(new, [] if thought else logprobs[i : i + 1])

    @property
    def _status(self) -> str:
        (text,) = self.texts
        assert text.done is not None
        return "incomplete" if text.done.reason == "length" else "completed"

    def _head(self) -> dict[str, Any]:
        asked = self.asked
        return {
            "id": answers.fresh("resp"),
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "model": self.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "metadata": asked.metadata or {},
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "reasoning": {"effort": asked.effort, "summary": None},
            "tool_choice": _shown(asked.tool_choice),
            "tools": [
                {"type": "function", **tool.function.model_dump(exclude_unset=True)}
                for tool in asked.tools or ()
            ],
            "text": {"format": {"type": asked.text.format.type if asked.text else "text"}},
            "truncation": "disabled",
            "usage": None,
        }

    def _finished(self, head: dict[str, Any], output: list[items.OutputItem]) -> dict[str, Any]:
        status, last = self._status, len(output) - 1
        usage = self.usage()
        response = head | {
            "status": status,
            "output": [
                item.shown(status if i == last else "completed") for i, item in enumerate(output)
            ],
            "incomplete_details": (
                {"reason": "max_output_tokens"} if status == "incomplete" else None
            ),
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {
                    "reasoning_tokens": usage["completion_tokens_details"]["reasoning_tokens"]
                },
                "total_tokens": usage["total_tokens"],
            },
        }
        return response | self.speculation(whole=True)


def _shown(choice: str | NamedTool | None) -> Any:
    """A choice of tools as a response holds it."""
    if isinstance(choice, NamedTool):
        return {"type": "function", "name": choice.function.name}
    return choice or "auto"
