"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from time import time
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from foretoken.server.api import answers
from foretoken.server.api.conversation import functions, turns
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import (
    MOST_LOGPROBS,
    Flag,
    Predicting,
    Sets,
    Whole,
    Wire,
    small,
)
from foretoken.server.process.generation import GeneratedText
from foretoken.server.process.messages import StepOutput


class JsonSchema(Wire):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class Chat(Predicting):
    """Request to complete a chat."""

    messages: Annotated[list[dict[str, Any]], Sets("prompt")] = Field(min_length=1)
    max_completion_tokens: Annotated[Whole | None, Sets("max_new_tokens")] = Field(None, ge=1)
    max_tokens: Annotated[Whole | None, Sets("max_new_tokens")] = Field(None, ge=1)
    top_logprobs: Annotated[Whole | None, Sets("logprobs")] = Field(None, ge=0, le=MOST_LOGPROBS)
    logprobs: Annotated[Flag | None, Sets("logprobs")] = None
    response_format: Annotated[ResponseFormat | None, Sets("structured")] = None
    tools: Annotated[list[dict[str, Any]] | None, Sets("chat_template_kwargs")] = None
    tool_choice: Literal["none", "auto"] | None = None
    parallel_tool_calls: Flag | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, Sets("chat_template_kwargs")] = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False

    template_field: ClassVar[str | None] = "messages"

    @property
    def prompts(self) -> list[list[dict[str, Any]]]:
        return [turns(self.messages, "messages")]

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reported(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def variables(self) -> dict[str, Any] | None:
        variables = dict(self.chat_template_kwargs or {})
        tools = functions(self.tools or ())
        if tools and self.tool_choice != "none":
            variables["tools"] = tools
        if self.continue_final_message:
            variables["continue_final_message"] = True
        elif not self.add_generation_prompt:
            variables["add_generation_prompt"] = False
        return variables or None

    def require(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if self.tool_choice == "auto" and not self.tools:
            raise BadRequestError("tool_choice goes with tools", "tool_choice")
        if len({self.max_completion_tokens, self.max_tokens} - {None}) > 1:
            raise BadRequestError(
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens "
                f"{self.max_tokens}; give one",
                "max_tokens",
            )
        super().require()

    def _structured(self) -> dict[str, Any] | None:
        response_format, structure = self.response_format, super()._structured()
        if response_format is None or response_format.type == "text":
            return structure
        if structure is not None:
            raise BadRequestError(
                "response_format and structured_outputs are both given; give one", "response_format"
            )
        if response_format.type == "json_object":
            return {"json_schema": {"type": "object"}}
        if response_format.json_schema is None or response_format.json_schema.json_schema is None:
            raise BadRequestError("response_format needs json_schema.schema", "response_format")
        return {"json_schema": small(response_format.json_schema.json_schema, "response_format")}


class ChatAnswer(answers.Answer[Chat]):
    """Answer to a chat."""

    def body(self) -> dict[str, Any]:
        answer = self._head("chat.completion") | {
            "choices": [self._choice(i, text) for i, text in enumerate(self.texts)],
            "usage": self.usage(),
        }
        return answer | self._extra(whole=True)

    async def events(self) -> AsyncGenerator[str]:
        head = self._head("chat.completion.chunk")
        for i in range(len(self.texts)):
            start = _delta(i, {"role": "assistant", "content": ""})
            yield answers.event(head | {"choices": [start]})
        async for i, part in self.generation.parts():
            if part.text or part.tokens:
                yield answers.event(head | self._chunk(i, part) | self.usage_so_far())
            if part.done is not None:
                end = _delta(i, {}, part.done.reason) | {"stop_reason": part.done.stop}
                yield answers.event(head | {"choices": [end]})
        if self.tells_usage:
            last: dict[str, Any] = {"choices": [], "usage": self.usage()}
            yield answers.event(head | last | self._extra())
        yield answers.DONE

    def _head(self, kind: str) -> dict[str, Any]:
        id = answers.fresh("chatcmpl")
        return {"id": id, "object": kind, "created": int(time()), "model": self.model}

    def _choice(self, i: int, text: GeneratedText) -> dict[str, Any]:
        assert text.done is not None
        choice: dict[str, Any] = {
            "index": i,
            "message": {"role": "assistant", "content": text.text, "refusal": None},
            "logprobs": _logprobs(text.logprobs) if self.asked.logprobs else None,
            "finish_reason": text.done.reason,
            "stop_reason": text.done.stop,
        }
        if self.asked.return_token_ids:
            choice["token_ids"] = text.tokens
        return choice

    def _chunk(self, i: int, part: StepOutput) -> dict[str, Any]:
        choice = _delta(i, {"content": part.text})
        if self.asked.logprobs:
            choice["logprobs"] = _logprobs(part.logprobs or [])
        if self.asked.return_token_ids:
            choice["token_ids"] = part.tokens
        return {"choices": [choice]} | self.steps_of(part)

    def _extra(self, *, whole: bool = False) -> dict[str, Any]:
        """Fields that only those get who ask for them."""
        extra = self.metrics() | self.speculation(whole=whole)
        ending = self.texts[0].done
        if self.asked.prompt_logprobs is not None and ending is not None:
            extra["prompt_logprobs"] = answers.read(ending.prompt_logprobs or [])
        return extra


def _delta(i: int, delta: dict[str, Any], reason: str | None = None) -> dict[str, Any]:
    return {"index": i, "delta": delta, "logprobs": None, "finish_reason": reason}


def _logprobs(tokens: list[Any]) -> dict[str, Any]:
    return {"content": [answers.known(each) for each in tokens], "refusal": None}
