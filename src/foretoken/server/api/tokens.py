"""POST /tokenize and /detokenize, in vLLM's form: from texts or messages to ids, and back."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field

from foretoken.server.api.chat import Message
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.wire import Body, Flag, Tool, Whole


class Tokenize(Body):
    """Request for the ids of a text, or of messages through the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = None
    add_generation_prompt: Flag = True
    continue_final_message: Flag = False
    return_token_strs: Flag = False

    sets: ClassVar[dict[str, tuple[str, ...]]] = {"prompt": ("prompt", "messages")}

    @property
    def variables(self) -> dict[str, Any] | None:
        """The template's variables."""
        variables = dict(self.chat_template_kwargs or {})
        if self.tools:
            variables["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools]
        if self.continue_final_message:
            variables["continue_final_message"] = True
        if not self.add_generation_prompt:
            variables["add_generation_prompt"] = False
        return variables or None

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

    tokens: list[Whole]
