"""POST /v1/responses: OpenAI's newer chat endpoint. Conversations are not stored, so a request must
contain the whole conversation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Iterator
from itertools import count
from time import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from foretoken.server.api import answers, response_items
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.protocol import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_METADATA_ENTRIES,
    ApiRequest,
    NamedTool,
    StrictBool,
    StrictInt,
    StrictModel,
    TemplatedRequest,
)
from foretoken.server.process.messages import StepOutput

LOGPROBS_INCLUDE = "message.output_text.logprobs"


def _to_items(content: Any) -> Any:
    return [{"role": "user", "content": content}] if isinstance(content, str) else content


class TextFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"] = "text"
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class TextOptions(StrictModel):
    format: TextFormat = TextFormat()  # pyright: ignore[reportCallIssue]
    verbosity: Literal["medium"] | None = None


class ReasoningOptions(StrictModel):
    effort: str | None = None
    summary: Literal["auto"] | None = None  # reasoning is returned in full
    generate_summary: None = None


class ResponsesRequest(TemplatedRequest):
    """Request for a response."""

    input: Annotated[
        Annotated[list[response_items.Item], Field(min_length=1, max_length=MAX_MESSAGES)],
        BeforeValidator(_to_items, json_schema_input_type=str | list[response_items.Item]),
    ]
    instructions: str | None = None
    max_output_tokens: StrictInt | None = Field(None, ge=1)
    text: TextOptions | None = None
    include: list[Literal["message.output_text.logprobs"]] | None = Field(None, max_length=16)
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    truncation: Literal["disabled"] | None = None
    background: StrictBool | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA_ENTRIES)
    reasoning: ReasoningOptions | None = None

    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {
        **ApiRequest.option_fields,
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
        return [[*system, *response_items.to_messages(self.input)]]

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def num_logprobs(self) -> int | None:
        is_asked = bool(self.top_logprobs) or LOGPROBS_INCLUDE in (self.include or ())
        return (self.top_logprobs or 0) if is_asked else None

    @property
    def effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning else None

    def require(self) -> None:
        """Raise BadRequestError as other endpoints do, and also for fields that only other
        endpoints support and for a conversation without messages."""
        foreign = {
            "n": (self.n or 1) > 1,
            "return_token_ids": self.return_token_ids,
            "prompt_logprobs": self.prompt_logprobs is not None,
            "background": self.background,
        }
        if not response_items.to_messages(self.input):
            raise BadRequestError("input has no message; give a message", "input")
        for name, is_given in foreign.items():
            if is_given:
                raise BadRequestError(f"/v1/responses does not support {name}; remove it", name)
        kind, schema, field = self.text_format
        if schema is not None and kind != "json_schema":
            problem = f"{field} has the type {kind}, which does not use a schema"
            raise BadRequestError(f"{problem}; give the type json_schema", field)
        super().require()

    @property
    def text_format(self) -> tuple[str, Any, str]:
        format = self.text.format if self.text else TextFormat()  # pyright: ignore[reportCallIssue]
        return format.type, format.json_schema, "text.format"


class ResponseAnswer(answers.Answer[ResponsesRequest]):
    """Answer of /v1/responses."""

    def build_body(self) -> dict[str, Any]:
        (output,) = self.outputs
        output_items = response_items.OutputItems(lambda *_, **__: "")  # without events
        for part in output.parts:
            list(self._stream_part(output_items, part))
        list(output_items.end(self._status, has_text=not self.request.requires_calls))
        return self._build_final(self._build_head(), output_items.items)

    async def stream_events(self) -> AsyncGenerator[str]:
        """Yield server-sent events, which have a type and a sequence number."""
        sequence_numbers, head = count(), self._build_head()

        def format_event(kind: str, **data: Any) -> str:
            return answers.format_event(
                {"type": kind, "sequence_number": next(sequence_numbers), **data}, kind
            )

        yield format_event("response.created", response=head)
        yield format_event("response.in_progress", response=head)
        output_items = response_items.OutputItems(format_event)
        async for _, part in self.generation.stream_parts():
            for each in self._stream_part(output_items, part):
                yield each
        for each in output_items.end(self._status, has_text=not self.request.requires_calls):
            yield each
        response = self._build_final(head, output_items.items)
        yield format_event(f"response.{response['status']}", response=response)

    def _stream_part(
        self, output_items: response_items.OutputItems, part: StepOutput
    ) -> Iterator[str]:
        """Add the output of a step to the items, token by token, and yield the events. Logprobs of
        reasoning are not reported."""
        logprobs: list[dict[str, Any]] = []
        if self.request.num_logprobs is not None:
            logprobs = [answers.format_logprob(each) for each in part.logprobs or ()]
        for i, (thought, new) in enumerate(self.get_reply(0).parse_tokens(part)):
            yield from output_items.add_pieces(new, [] if thought else logprobs[i : i + 1])

    @property
    def _status(self) -> str:
        (output,) = self.outputs
        assert output.done is not None
        return "incomplete" if output.done.reason == "length" else "completed"

    def _build_head(self) -> dict[str, Any]:
        request = self.request
        return {
            "id": answers.make_id("resp"),
            "object": "response",
            "created_at": int(time()),
            "status": "in_progress",
            "model": self.model,
            "output": [],
            "error": None,
            "incomplete_details": None,
            "instructions": request.instructions,
            "max_output_tokens": request.max_output_tokens,
            "metadata": request.metadata or {},
            "parallel_tool_calls": request.parallel_tool_calls is not False,
            "temperature": request.temperature,
            "top_p": request.top_p,
            "reasoning": {"effort": request.effort, "summary": None},
            "tool_choice": _format_tool_choice(request.tool_choice),
            "tools": [
                {"type": "function", **tool.function.model_dump(exclude_unset=True)}
                for tool in request.tools or ()
            ],
            "text": {"format": {"type": request.text.format.type if request.text else "text"}},
            "truncation": "disabled",
            "usage": None,
        }

    def _build_final(
        self, head: dict[str, Any], output: list[response_items.OutputItem]
    ) -> dict[str, Any]:
        status, last = self._status, len(output) - 1
        usage = self.get_usage()
        response = head | {
            "status": status,
            "output": [
                item.to_dict(status if i == last else "completed") for i, item in enumerate(output)
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
        return response | self.summarize_speculation(with_steps=True)


def _format_tool_choice(choice: str | NamedTool | None) -> Any:
    if isinstance(choice, NamedTool):
        return {"type": "function", "name": choice.function.name}
    return choice or "auto"
