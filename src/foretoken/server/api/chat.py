"""POST /v1/chat/completions: messages in, the assistant's next message out."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import (
    MOST_CALLS,
    MOST_LOGPROBS,
    MOST_MESSAGES,
    MOST_METADATA,
    ApiRequest,
    Content,
    Flag,
    Predicting,
    Templated,
    Whole,
    Wire,
    require_one_opening,
)
from foretoken.server.process.generation import GeneratedText
from foretoken.server.process.messages import StepOutput, TokenLogprob


class JsonSchema(Wire):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: Flag | None = None


class ResponseFormat(Wire):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="of a json_object, as older clients send it"
    )

    def require(self) -> None:
        """Raise BadRequestError for a schema that this type ignores."""
        others = {"json_schema": self.json_schema, "json_object": self.object_schema}
        for kind, schema in others.items():
            if schema is not None and kind != self.type:
                name = "json_schema" if kind == "json_schema" else "schema"
                problem = f"response_format has the type {self.type}, which reads no {name}"
                raise BadRequestError(f"{problem}; give the type {kind}", "response_format")


class Message(BaseModel, extra="allow"):
    """A message; the chat template says which roles and other fields there are."""

    role: str
    content: Content | None = None

    @model_validator(mode="after")
    def bounded(self) -> Message:
        calls: Any = (self.model_extra or {}).get("tool_calls")
        if isinstance(calls, list) and len(calls) > MOST_CALLS:
            raise ValueError(f"it has {len(calls)} tool_calls, at most {MOST_CALLS} are allowed")
        return self


class Chat(Predicting, Templated):
    """Request to complete a chat."""

    messages: list[Message] = Field(min_length=1, max_length=MOST_MESSAGES)
    max_completion_tokens: Whole | None = Field(None, ge=1)
    max_tokens: Whole | None = Field(None, ge=1)
    top_logprobs: Whole | None = Field(None, ge=0, le=MOST_LOGPROBS)
    logprobs: Flag | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MOST_METADATA)
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False

    sets: ClassVar[dict[str, tuple[str, ...]]] = {
        **ApiRequest.sets,
        "prompt": ("messages",),
        "max_new_tokens": ("max_completion_tokens", "max_tokens"),
        "structured": ("response_format", "structured_outputs", "tools"),
        "chat_template_kwargs": ("tools", "chat_template_kwargs", "reasoning_effort"),
    }

    @property
    def prompts(self) -> list[list[dict[str, Any]]]:
        return [[message.model_dump(exclude_unset=True) for message in self.messages]]

    @property
    def max_new_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def reported(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def settings(self) -> dict[str, Any]:
        names = {"add_generation_prompt", "continue_final_message"} & self.model_fields_set
        return super().settings | {name: getattr(self, name) for name in sorted(names)}

    def require(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if len({self.max_completion_tokens, self.max_tokens} - {None}) > 1:
            raise BadRequestError(
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens "
                f"{self.max_tokens}; give one",
                "max_tokens",
            )
        require_one_opening(self)
        if self.response_format is not None:
            self.response_format.require()
        super().require()

    @property
    def form(self) -> tuple[str, Any, str]:
        asked = self.response_format or ResponseFormat(type="text")  # pyright: ignore[reportCallIssue]
        nested = asked.json_schema.json_schema if asked.json_schema else None
        schema = nested if asked.type == "json_schema" else asked.object_schema
        return asked.type, schema, "response_format"


class ChatAnswer(answers.ChoicesAnswer[Chat]):
    """Answer to a chat."""

    prefix = "chatcmpl"
    kinds = ("chat.completion", "chat.completion.chunk")

    def body(self) -> dict[str, Any]:
        answer, done = super().body(), self.texts[0].done
        if self.asked.prompt_logprobs is not None and done is not None:
            answer["prompt_logprobs"] = answers.by_id(done.prompt_logprobs or [])
        if self.asked.metadata:
            answer["metadata"] = self.asked.metadata
        return answer | self.first(self.texts[0])

    def first(self, text: GeneratedText) -> dict[str, Any]:
        return {"prompt_token_ids": text.accepted.prompt_ids} if self.asked.return_token_ids else {}

    def choice(self, i: int, text: GeneratedText) -> dict[str, Any]:
        reply = self.reply(i)
        for part in text.parts:
            reply.feed(part)
        silent = self.asked.forced or (reply.calls and not reply.text)
        content = None if silent else reply.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["tool_calls"] = [call.shown() for call in reply.calls]
        return {"message": message} | self._logprobs(text.logprobs)

    def beginning(self, text: GeneratedText) -> dict[str, Any] | None:
        return {"delta": {"role": "assistant", "content": None if self.asked.forced else ""}}

    def delta(self, i: int, part: StepOutput) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        reply = self.reply(i)
        for told in reply.feed(part):
            if told.thought:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + told.thought
            elif told.call is None:
                delta["content"] = delta.get("content", "") + told.text
            else:
                delta.setdefault("tool_calls", []).append(reply.calls[told.call].delta(told))
        if not delta and not self.asked.forced:
            delta["content"] = ""
        return {"delta": delta} | self._logprobs(part.logprobs or [])

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        if not self.asked.logprobs:
            return {}
        return {"logprobs": {"content": [answers.known(each) for each in tokens], "refusal": None}}
