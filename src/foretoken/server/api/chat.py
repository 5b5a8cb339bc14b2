"""POST /v1/chat/completions: generates the assistant's next message of a conversation."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import BaseModel, Field, model_validator

from foretoken.server.api import answers
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.protocol import (
    MAX_LOGPROBS,
    MAX_MESSAGES,
    MAX_METADATA_ENTRIES,
    MAX_TOOL_CALLS,
    ApiRequest,
    Content,
    PredictionRequest,
    StrictBool,
    StrictInt,
    StrictModel,
    TemplatedRequest,
    require_one_generation_prompt,
)
from foretoken.server.process.generation import GeneratedOutput
from foretoken.server.process.messages import StepOutput, TokenLogprob


class JsonSchema(StrictModel):
    name: str | None = None
    description: str | None = None
    json_schema: dict[str, Any] | bool | None = Field(None, alias="schema")
    strict: StrictBool | None = None


class ResponseFormat(StrictModel):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None
    object_schema: dict[str, Any] | None = Field(
        None, alias="schema", description="schema of a json_object, as older clients send it"
    )

    def require(self) -> None:
        """Raise BadRequestError if the request has a schema that `type` would ignore."""
        others = {"json_schema": self.json_schema, "json_object": self.object_schema}
        for kind, schema in others.items():
            if schema is not None and kind != self.type:
                name = "json_schema" if kind == "json_schema" else "schema"
                problem = f"response_format has the type {self.type}, which does not use {name}"
                raise BadRequestError(f"{problem}; give the type {kind}", "response_format")


class Message(BaseModel, extra="allow"):
    """A message of the conversation. Any role and any additional fields are accepted and passed to
    the chat template."""

    role: str
    content: Content | None = None

    @model_validator(mode="after")
    def check_num_tool_calls(self) -> Message:
        calls: Any = (self.model_extra or {}).get("tool_calls")
        if isinstance(calls, list) and len(calls) > MAX_TOOL_CALLS:
            raise ValueError(
                f"the message has {len(calls)} tool_calls; give at most {MAX_TOOL_CALLS}"
            )
        return self


class ChatCompletionRequest(PredictionRequest, TemplatedRequest):
    """Request for a chat completion."""

    messages: list[Message] = Field(min_length=1, max_length=MAX_MESSAGES)
    max_completion_tokens: StrictInt | None = Field(None, ge=1)
    max_tokens: StrictInt | None = Field(None, ge=1)
    top_logprobs: StrictInt | None = Field(None, ge=0, le=MAX_LOGPROBS)
    logprobs: StrictBool | None = None
    response_format: ResponseFormat | None = None
    reasoning_effort: str | None = None
    metadata: dict[str, str] | None = Field(None, max_length=MAX_METADATA_ENTRIES)
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False

    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {
        **ApiRequest.option_fields,
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
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def effort(self) -> str | None:
        return self.reasoning_effort

    @property
    def template_settings(self) -> dict[str, Any]:
        names = {"add_generation_prompt", "continue_final_message"} & self.model_fields_set
        return super().template_settings | {name: getattr(self, name) for name in sorted(names)}

    def require(self) -> None:
        if self.top_logprobs and not self.logprobs:
            raise BadRequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if len({self.max_completion_tokens, self.max_tokens} - {None}) > 1:
            raise BadRequestError(
                f"max_completion_tokens is {self.max_completion_tokens} and max_tokens "
                f"is {self.max_tokens}; leave out one of the two",
                "max_tokens",
            )
        require_one_generation_prompt(self)
        if self.response_format is not None:
            self.response_format.require()
        super().require()

    @property
    def text_format(self) -> tuple[str, Any, str]:
        format = self.response_format or ResponseFormat(type="text")  # pyright: ignore[reportCallIssue]
        nested = format.json_schema.json_schema if format.json_schema else None
        schema = nested if format.type == "json_schema" else format.object_schema
        return format.type, schema, "response_format"


class ChatAnswer(answers.ChoicesAnswer[ChatCompletionRequest]):
    """Answer to a chat completion request."""

    id_prefix = "chatcmpl"
    object_names = ("chat.completion", "chat.completion.chunk")

    def build_body(self) -> dict[str, Any]:
        answer, done = super().build_body(), self.outputs[0].done
        if self.request.prompt_logprobs is not None and done is not None:
            answer["prompt_logprobs"] = answers.format_prompt_logprobs(done.prompt_logprobs or [])
        if self.request.metadata:
            answer["metadata"] = self.request.metadata
        return answer | self.build_first_fields(self.outputs[0])

    def build_first_fields(self, output: GeneratedOutput) -> dict[str, Any]:
        return (
            {"prompt_token_ids": output.accepted.prompt_ids}
            if self.request.return_token_ids
            else {}
        )

    def build_choice(self, i: int, output: GeneratedOutput) -> dict[str, Any]:
        reply = self.get_reply(i)
        for part in output.parts:
            reply.feed(part)
        no_content = self.request.requires_calls or (reply.calls and not reply.text)
        content = None if no_content else reply.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if reply.thoughts:
            message["reasoning_content"] = reply.thoughts
        if reply.calls:
            message["tool_calls"] = [call.to_dict() for call in reply.calls]
        return {"message": message} | self._logprobs(output.logprobs)

    def build_first_delta(self, output: GeneratedOutput) -> dict[str, Any] | None:
        return {
            "delta": {"role": "assistant", "content": None if self.request.requires_calls else ""}
        }

    def build_delta(self, i: int, part: StepOutput) -> dict[str, Any]:
        delta: dict[str, Any] = {}
        reply = self.get_reply(i)
        for event in reply.feed(part):
            if event.thought:
                delta["reasoning_content"] = delta.get("reasoning_content", "") + event.thought
            elif event.call is None:
                delta["content"] = delta.get("content", "") + event.text
            else:
                delta.setdefault("tool_calls", []).append(
                    reply.calls[event.call].build_delta(event)
                )
        if not delta and not self.request.requires_calls:
            delta["content"] = ""
        return {"delta": delta} | self._logprobs(part.logprobs or [])

    def _logprobs(self, tokens: list[TokenLogprob]) -> dict[str, Any]:
        if not self.request.logprobs:
            return {}
        return {
            "logprobs": {
                "content": [answers.format_logprob(each) for each in tokens],
                "refusal": None,
            }
        }
