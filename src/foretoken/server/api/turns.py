"""Messages as a chat template reads them: parts of text become one text, others are refused."""

from __future__ import annotations

from typing import Any

from foretoken.server.api.errors import BadRequestError

TEXTS = ("text", "input_text", "output_text", "refusal")


def turns(messages: list[Any], param: str) -> list[dict[str, Any]]:
    """The messages, their contents as text. BadRequestError for images and all else that is no
    text; `param`: the request's field, for errors."""
    if not messages:
        raise BadRequestError(f"{param} is empty; give a message or more", param)
    return [_turn(i, message, param) for i, message in enumerate(messages)]


def _turn(i: int, message: Any, param: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise BadRequestError(f"{param}[{i}] is no message with a role", f"{param}[{i}]")
    content: Any = message.get("content")
    if isinstance(content, list):
        parts = [_text(part, f"{param}[{i}].content[{k}]") for k, part in enumerate(content)]
        return {**message, "content": "".join(parts)}
    if content is not None and not isinstance(content, str):
        raise BadRequestError(f"{param}[{i}].content is neither text nor parts", f"{param}[{i}]")
    return message


def _text(part: Any, place: str) -> str:
    if not isinstance(part, dict):
        raise BadRequestError(f"{place} is no part of a message", place)
    kind = part.get("type")
    if kind not in TEXTS:
        raise BadRequestError(f"{place} is {str(kind)[:40]!r}; this server reads text only", place)
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise BadRequestError(f"{place} has no text", place)
    return text
