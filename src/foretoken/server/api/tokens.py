"""POST /tokenize and /detokenize, in vLLM's form: from texts or messages to ids, and back."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from foretoken.server.api.chat import Message
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import (
    MOST_MESSAGES,
    MOST_TOOLS,
    MOST_VARIABLES,
    Body,
    Flag,
    Tool,
    Whole,
    require_one_opening,
    small,
)

MOST_TOKENS = 2**17


class Tokenize(Body):
    """Request for the ids of a text, or of messages through the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MOST_MESSAGES)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=MOST_TOOLS)
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    return_token_strs: Flag = False

    sets: ClassVar[dict[str, tuple[str, ...]]] = {"prompt": ("prompt", "messages")}

    @model_validator(mode="after")
    def consistent(self) -> Tokenize:
        """Refuse fields that contradict one another."""
        require_one_opening(self)
        names = ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message")
        for name in names if self.messages is None else ():
            if name in self.model_fields_set and getattr(self, name) is not None:
                raise BadRequestError(f"{name} goes with messages; leave it out", name)
        return self

    @property
    def variables(self) -> dict[str, Any] | None:
        """The template's variables."""
        small(self.chat_template_kwargs, "chat_template_kwargs", MOST_VARIABLES)
        variables = dict(self.chat_template_kwargs or {})
        if self.tools:
            variables["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools]
            small(variables["tools"], "tools", MOST_VARIABLES)
        given = {"add_generation_prompt", "continue_final_message"} & self.model_fields_set
        return variables | {name: getattr(self, name) for name in sorted(given)} or None

    @property
    def written(self) -> str | list[dict[str, Any]]:
        """The text, or the messages."""
        if self.prompt is not None and self.messages is None:
            return self.prompt
        if self.messages is None or self.prompt is not None:
            raise BadRequestError("give prompt or messages, one of them", "prompt")
        return [message.model_dump(exclude_unset=True) for message in self.messages]


class Detokenize(Body):
    """Request for the text of ids."""

    tokens: list[Whole] = Field(max_length=MOST_TOKENS)
