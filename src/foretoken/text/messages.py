"""Check that chat messages form a conversation and that the parts of their contents are valid."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from foretoken.errors import InputError, format_value

Message = Mapping[str, Any]  # "role", and "content": a str or a list of parts

# Media types of parts, and the keys that may hold the content
MEDIA_PART_KEYS: dict[str, tuple[str, ...]] = {
    "image": ("image", "url", "path", "base64"),
    "audio": ("audio", "url", "path"),
}
# Unsupported types, and why: transformers would fetch URLs, or drop the parts
ADDRESS_REASON = "a URL, which is not fetched here; give a part of the type image or audio"
UNSUPPORTED_PARTS = {"video": "a video, which is not supported; give images of its frames"}
UNSUPPORTED_PARTS |= dict.fromkeys(
    ("image_url", "input_image", "audio_url", "input_audio", "video_url"), ADDRESS_REASON
)


def as_conversations(prompts: Any) -> list[list[Message]] | None:
    """Return the conversations in `prompts`, which is one list of messages or a list of
    conversations; None if no prompt is a conversation. Raises InputError if only some prompts are
    conversations."""
    if isinstance(prompts, Mapping) and "role" in prompts:
        raise InputError("prompts is a single message; give a list of messages")
    if _is_conversation(prompts):
        return [list(prompts)]
    if not isinstance(prompts, list | tuple) or not any(map(_is_conversation, prompts)):
        return None
    for i, prompt in enumerate(prompts):
        if not _is_conversation(prompt):
            problem = "empty" if prompt == [] else format_value(prompt)
            raise InputError(
                f"prompt {i} is {problem}, but other prompts are conversations; give lists of "
                "messages only"
            )
    return [list(prompt) for prompt in prompts]


def _is_conversation(prompt: Any) -> bool:
    """Return whether a prompt is a conversation. Only its first item is checked, because a prompt
    may be a long list of token ids."""
    return isinstance(prompt, list | tuple) and bool(prompt) and isinstance(prompt[0], Mapping)


def require_conversation(messages: object) -> None:
    """Raise InputError if `messages` is not a conversation."""
    if not isinstance(messages, list | tuple):
        raise InputError(f"messages is {format_value(messages)}; give a list of messages")
    if not messages:
        raise InputError("the conversation is empty; give one message or more")
    for i, message in enumerate(messages):
        _require_message(i, message)


def _require_message(i: int, message: Any) -> None:
    if not isinstance(message, Mapping):
        raise InputError(
            f"message {i} is {format_value(message)}; give a dict with 'role' and 'content'"
        )
    role, content = message.get("role"), message.get("content")
    if not isinstance(role, str) or not role:
        problem = f"message {i} has the role {format_value(role)}; give a str, such as 'user'"
        raise InputError(problem).with_option(f"prompt[{i}].role")
    if not isinstance(content, str | list | tuple) and not _has_tool_calls(message):
        raise InputError(
            f"message {i} has the content {format_value(content)}; give a str or a list of parts"
        ).with_option(f"prompt[{i}].content")
    for j, part in enumerate(content if isinstance(content, list | tuple) else ()):
        known = isinstance(part, Mapping)
        if not known or (
            part.get("type", "text") == "text" and not isinstance(part.get("text"), str)
        ):
            problem = f"message {i}, part {j} is {format_value(part)}"
            raise InputError(
                f"{problem}; give a dict with 'type', and 'text' if the type is text"
            ).with_option(f"prompt[{i}].content")
    try:
        str(content).encode()
    except UnicodeEncodeError:
        problem = InputError(f"message {i} is not valid text; give text in UTF-8")
        raise problem.with_option(f"prompt[{i}].content") from None


def _has_tool_calls(message: Message) -> bool:
    """Return whether a message has tool calls and no content."""
    return message.get("content") is None and bool(message.get("tool_calls"))


def has_media(messages: Sequence[Message]) -> bool:
    """Return whether a part of a message is an image, audio or video."""
    kinds = (part.get("type") for message in messages for part in get_parts(message))
    return any(kind in (*MEDIA_PART_KEYS, *UNSUPPORTED_PARTS) for kind in kinds)


def get_parts(message: Message) -> list[Mapping[str, Any]]:
    """Return the parts of a message's content; [] for a string."""
    content = message.get("content") if isinstance(message, Mapping) else None
    listed = cast(list[Any], content) if isinstance(content, list | tuple) else []
    return [part for part in listed if isinstance(part, Mapping)]
