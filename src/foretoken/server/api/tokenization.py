"""POST /tokenize and /detokenize, as in vLLM: convert a string or messages to token ids, and token
ids to a string."""

from __future__ import annotations

from typing import Any, ClassVar

from pydantic import Field, model_validator

from foretoken.server.api.chat import Message
from foretoken.server.api.errors import BadRequestError
from foretoken.server.api.protocol import (
    MAX_MESSAGES,
    MAX_TOOLS,
    MAX_VARIABLES_CHARACTERS,
    Body,
    StrictBool,
    StrictInt,
    Tool,
    require_one_generation_prompt,
    require_small,
)

MAX_DETOKENIZE_TOKENS = 2**17


class TokenizeRequest(Body):
    """Request for the token ids of `prompt`, or of `messages` rendered by the chat template."""

    prompt: str | None = None
    messages: list[Message] | None = Field(None, min_length=1, max_length=MAX_MESSAGES)
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[Tool] | None = Field(None, max_length=MAX_TOOLS)
    add_generation_prompt: StrictBool = True
    continue_final_message: StrictBool = False
    return_token_strs: StrictBool = False

    option_fields: ClassVar[dict[str, tuple[str, ...]]] = {"prompt": ("prompt", "messages")}

    @model_validator(mode="after")
    def check_consistency(self) -> TokenizeRequest:
        """Raise BadRequestError for fields that contradict one another, such as `tools` without
        `messages`."""
        require_one_generation_prompt(self)
        names = ("chat_template_kwargs", "tools", "add_generation_prompt", "continue_final_message")
        for name in names if self.messages is None else ():
            if name in self.model_fields_set and getattr(self, name) is not None:
                raise BadRequestError(f"{name} needs messages; leave out {name}", name)
        return self

    @property
    def template_variables(self) -> dict[str, Any] | None:
        """Return the variables for the chat template; None if there are no variables. Raises
        BadRequestError if the variables are too long."""
        require_small(self.chat_template_kwargs, "chat_template_kwargs", MAX_VARIABLES_CHARACTERS)
        variables = dict(self.chat_template_kwargs or {})
        if self.tools:
            variables["tools"] = [tool.model_dump(exclude_unset=True) for tool in self.tools]
            require_small(variables["tools"], "tools", MAX_VARIABLES_CHARACTERS)
        given = {"add_generation_prompt", "continue_final_message"} & self.model_fields_set
        return variables | {name: getattr(self, name) for name in sorted(given)} or None

    @property
    def prompt_or_messages(self) -> str | list[dict[str, Any]]:
        """Return the prompt, or the messages. Raises BadRequestError unless exactly one of the two
        is given."""
        if self.prompt is not None and self.messages is None:
            return self.prompt
        if self.messages is None or self.prompt is not None:
            raise BadRequestError("give either prompt or messages", "prompt")
        return [message.model_dump(exclude_unset=True) for message in self.messages]


class DetokenizeRequest(Body):
    """Request for the text of token ids."""

    tokens: list[StrictInt] = Field(max_length=MAX_DETOKENIZE_TOKENS)
