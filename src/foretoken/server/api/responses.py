"""POST /v1/responses: OpenAI's later form of a chat, without what it stores."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from itertools import count
from time import time
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.tools import functions
from foretoken.server.api.turns import turns
from foretoken.server.api.wire import MOST_LOGPROBS, ApiRequest, Flag, Whole, Wire, small
from foretoken.server.process.generation import Generation

KEYS = ("role", "content", "type", "id", "status")  # of a message; the last two say nothing new
ROLES = ("system", "developer", "user", "assistant")
LOGPROBS = "message.output_text.logprobs"


class Format(Wire):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: Flag | None = None


class TextOptions(Wire):
    format: Format = Format()  # pyright: ignore[reportCallIssue]


def _flag(value: Any) -> bool:
    if not isinstance(value, bool):  # 0 is as good as False to a Literal
        raise ValueError("give false, or leave it out")
    return value


class Responses(ApiRequest):
    """The request."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: Whole | None = Field(None, ge=1)
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = None
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Flag | None = None
    truncation: Literal["disabled"] | None = None
    background: Annotated[Literal[False], BeforeValidator(_flag)] | None = None

    @property
    def messages(self) -> list[dict[str, Any]]:
        content = self.input
        items: list[Any] = (
            [{"role": "user", "content": content}] if isinstance(content, str) else content
        )
        kinds = [item.get("type", "message") for item in items if isinstance(item, dict)]
        for i, kind in enumerate(kinds):
            if kind != "message":
                raise BadRequestError(
                    f"input[{i}] is {str(kind)[:40]!r}; give messages", f"input[{i}].type"
                )
        for i, item in enumerate(items):
            if unknown := [k for k in item if k not in KEYS] if isinstance(item, dict) else []:
                message = f"input[{i}] holds {unknown[0][:40]!r}; known are {', '.join(KEYS)}"
                raise BadRequestError(message, f"input[{i}].{unknown[0][:40]}")
        plain = [{k: v for k, v in item.items() if k in ("role", "content")} for item in items]
        system = [{"role": "system", "content": self.instructions}] if self.instructions else []
        return [*system, *turns(plain, "input", ROLES)]

    @property
    def tells(self) -> bool:
        """Whether logprobs are asked for."""
        return bool(self.top_logprobs) or LOGPROBS in (self.include or ())

    def options(self, facts: Mapping[str, Any]) -> dict[str, Any]:
        options = super().options(facts) | self._bounded(self.max_output_tokens)
        if self.tells:
            options["logprobs"] = self.top_logprobs or 0
        tools = functions(self.tools or ())
        if tools and self.tool_choice != "none":
            options["chat_template_kwargs"] = {"tools": tools}
        return options

    def _structured(self) -> dict[str, Any] | None:
        text_format = self.text.format if self.text is not None else Format()  # pyright: ignore[reportCallIssue]
        if text_format.type == "text":
            return super()._structured()
        if text_format.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if text_format.json_schema is None:
            raise BadRequestError("text.format needs a schema", "text.format.schema")
        return {"json_schema": small(text_format.json_schema, "text.format")}


def require(wishes: Responses) -> None:
    """BadRequestError for what the other endpoints take and a response has no place for."""
    if wishes.n is not None and wishes.n > 1:
        raise BadRequestError("n is for chat completions; a response is one text", "n")
    for name in ("prompt_logprobs", "return_token_ids"):
        if getattr(wishes, name):
            raise BadRequestError(
                f"{name} is for completions; a response has no place for it", name
            )
    if wishes.structured_outputs and wishes.text is not None and wishes.text.format.type != "text":
        raise BadRequestError("text.format and structured_outputs are both given", "text")


def body(wishes: Responses, model: str, generation: Generation) -> dict[str, Any]:
    """The whole answer, once all is written."""
    return _finished(_begun(wishes, model), wishes, generation, answers.fresh("msg"))


async def events(wishes: Responses, model: str, generation: Generation) -> AsyncGenerator[str]:
    """Typed server-sent events, numbered."""
    numbers, item = count(), answers.fresh("msg")
    head = _begun(wishes, model)
    place = {"item_id": item, "output_index": 0, "content_index": 0}

    def event(kind: str, **data: Any) -> str:
        return answers.event({"type": kind, "sequence_number": next(numbers), **data}, kind)

    yield event("response.created", response=head)
    yield event("response.in_progress", response=head)
    yield event("response.output_item.added", output_index=0, item=_item(item, [], "in_progress"))
    yield event("response.content_part.added", **place, part=_part("", []))
    async for _, part in generation.parts():
        if part.text or part.logprobs:
            logprobs = [answers.known(each) for each in part.logprobs or []]
            yield event("response.output_text.delta", **place, delta=part.text, logprobs=logprobs)
    response = _finished(head, wishes, generation, item)
    (message,) = response["output"]
    (content,) = message["content"]
    logprobs = content["logprobs"]
    yield event("response.output_text.done", **place, text=content["text"], logprobs=logprobs)
    yield event("response.content_part.done", **place, part=content)
    yield event("response.output_item.done", output_index=0, item=message)
    yield event(f"response.{response['status']}", response=response)


def _begun(wishes: Responses, model: str) -> dict[str, Any]:
    return {
        "id": answers.fresh("resp"),
        "object": "response",
        "created_at": int(time()),
        "status": "in_progress",
        "model": model,
        "output": [],
        "error": None,
        "incomplete_details": None,
        "instructions": wishes.instructions,
        "max_output_tokens": wishes.max_output_tokens,
        "metadata": {},
        "parallel_tool_calls": bool(wishes.parallel_tool_calls),
        "temperature": wishes.temperature,
        "top_p": wishes.top_p,
        "tool_choice": wishes.tool_choice or "auto",
        "tools": wishes.tools or [],
        "text": {"format": {"type": wishes.text.format.type if wishes.text else "text"}},
        "truncation": "disabled",
        "usage": None,
    }


def _finished(
    head: dict[str, Any], wishes: Responses, generation: Generation, item: str
) -> dict[str, Any]:
    (text,) = generation.texts
    assert text.done is not None
    cut = text.done.reason == "length"
    status = "incomplete" if cut else "completed"
    logprobs = [answers.known(each) for each in text.logprobs] if wishes.tells else []
    usage = answers.usage(generation)
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
    response |= answers.metrics(generation, wishes.speculation.metrics)
    if wishes.speculation.steps:
        response["speculation"] = answers.rates(generation.texts) | {"steps": [text.steps]}
    return response


def _item(id: str, content: list[dict[str, Any]], status: str) -> dict[str, Any]:
    return {"id": id, "type": "message", "role": "assistant", "status": status, "content": content}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}
