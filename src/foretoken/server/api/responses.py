"""POST /v1/responses: OpenAI's later form of a chat, without what it stores."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from itertools import count
from time import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, model_validator

from foretoken.errors import shown
from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import (
    MOST_LOGPROBS,
    ApiRequest,
    Content,
    Flag,
    Tool,
    Whole,
    Wire,
    refused,
    small,
)

LOGPROBS = "message.output_text.logprobs"


class Item(Wire):
    """A message of the conversation."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    id: str | None = None
    status: str | None = None
    phase: None = None  # which clients send of an answer that they had

    @model_validator(mode="before")
    @classmethod
    def message(cls, item: Any) -> Any:
        """Refuse an item of another type by its type, and not by what only such an item holds."""
        if isinstance(item, dict) and (kind := item.get("type", "message")) != "message":
            raise refused("type", f"it is {shown(kind)}; give messages")
        return item


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


class Responses(ApiRequest):
    """Request for a response."""

    input: Annotated[
        Annotated[list[Item], Field(min_length=1)],
        BeforeValidator(_items, json_schema_input_type=str | list[Item]),
    ]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[Tool] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Flag | None = None
    truncation: Literal["disabled"] | None = None
    background: Flag | None = None

    templated: ClassVar[bool] = True
    sets: ClassVar[dict[str, tuple[str, ...]]] = {
        **ApiRequest.sets,
        "prompt": ("input",),
        "max_new_tokens": ("max_output_tokens",),
        "logprobs": ("top_logprobs",),
        "structured": ("text.format", "structured_outputs"),
        "chat_template_kwargs": ("tools",),
    }

    @property
    def prompts(self) -> list[list[dict[str, Any]]]:
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        turns = [item.model_dump(include={"role", "content"}) for item in self.input]
        return [[*system, *turns]]

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def reported(self) -> int | None:
        told = bool(self.top_logprobs) or LOGPROBS in (self.include or ())
        return (self.top_logprobs or 0) if told else None

    @property
    def variables(self) -> dict[str, Any] | None:
        if not self.tools or self.tool_choice == "none":
            return None
        return {"tools": [tool.model_dump(exclude_unset=True) for tool in self.tools]}

    def require(self) -> None:
        """Refuse, too, what the other endpoints take and a response has no place for."""
        foreign = {
            "n": (self.n or 1) > 1,
            "return_token_ids": self.return_token_ids,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "background": self.background,
        }
        for name, asked in foreign.items():
            if asked:
                raise BadRequestError(f"a response has no {name}; leave it out", name)
        if self.structured_outputs and self.text is not None and self.text.format.type != "text":
            raise BadRequestError("text.format and structured_outputs are both given", "text")
        super().require()

    def _structured(self) -> dict[str, Any] | None:
        text_format = self.text.format if self.text is not None else Format()  # pyright: ignore[reportCallIssue]
        if text_format.type == "text":
            return super()._structured()
        if text_format.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if text_format.json_schema is None:
            raise BadRequestError("text.format needs a schema", "text.format.schema")
        return {"json_schema": small(text_format.json_schema, "text.format")}


class ResponseAnswer(answers.Answer[Responses]):
    """Answer to a request for a response."""

    def body(self) -> dict[str, Any]:
        return self._finished(self._head(), answers.fresh("msg"))

    async def events(self) -> AsyncGenerator[str]:
        """Yield typed server-sent events, numbered."""
        numbers, item = count(), answers.fresh("msg")
        head = self._head()
        place = {"item_id": item, "output_index": 0, "content_index": 0}

        def event(kind: str, **data: Any) -> str:
            return answers.event({"type": kind, "sequence_number": next(numbers), **data}, kind)

        yield event("response.created", response=head)
        yield event("response.in_progress", response=head)
        started = _item(item, [], "in_progress")
        yield event("response.output_item.added", output_index=0, item=started)
        yield event("response.content_part.added", **place, part=_part("", []))
        async for _, part in self.generation.parts():
            if part.text or part.logprobs:
                told = [answers.known(each) for each in part.logprobs or []]
                yield event("response.output_text.delta", **place, delta=part.text, logprobs=told)
        response = self._finished(head, item)
        (message,) = response["output"]
        (content,) = message["content"]
        told = content["logprobs"]
        yield event("response.output_text.done", **place, text=content["text"], logprobs=told)
        yield event("response.content_part.done", **place, part=content)
        yield event("response.output_item.done", output_index=0, item=message)
        yield event(f"response.{response['status']}", response=response)

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
            "metadata": {},
            "parallel_tool_calls": bool(asked.parallel_tool_calls),
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "tool_choice": asked.tool_choice or "auto",
            "tools": [
                {"type": "function", **tool.function.model_dump()} for tool in asked.tools or ()
            ],
            "text": {"format": {"type": asked.text.format.type if asked.text else "text"}},
            "truncation": "disabled",
            "usage": None,
        }

    def _finished(self, head: dict[str, Any], item: str) -> dict[str, Any]:
        (text,) = self.texts
        assert text.done is not None
        cut = text.done.reason == "length"
        status = "incomplete" if cut else "completed"
        told = self.asked.reported is not None
        logprobs = [answers.known(each) for each in text.logprobs] if told else []
        usage = answers.usage(self.generation)
        response = head | {
            "status": status,
            "output": [_item(item, [_part(text.text, logprobs)], status)],
            "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
            "usage": {
                "input_tokens": usage["prompt_tokens"],
                "input_tokens_details": usage["prompt_tokens_details"],
                "output_tokens": usage["completion_tokens"],
                "output_tokens_details": {"reasoning_tokens": 0},
                "total_tokens": usage["total_tokens"],
            },
        }
        return response | self.metrics() | self.speculation(whole=True)


def _item(id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
