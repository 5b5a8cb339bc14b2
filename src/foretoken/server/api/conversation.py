"""Messages and tools as a chat template reads them: parts of text become one text, functions have
one form, all else is refused."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.server.api.errors import BadRequestError

TEXTS = ("text", "input_text", "output_text", "refusal")


def turns(
    messages: list[Any], param: str, roles: tuple[str, ...] | None = None
) -> list[dict[str, Any]]:
    """The messages, their contents as text. BadRequestError for images and all else that is no
    text; `param`: the request's field, for errors; `roles`: those that it may have, where the
    template is not asked."""
    if not messages:
        raise BadRequestError(f"{param} is empty; give a message or more", param)
    turned = [_turn(i, message, param) for i, message in enumerate(messages)]
    for i, message in enumerate(turned):
        if roles is not None and (role := message["role"]) not in roles:
            place = f"{param}[{i}].role"
            raise BadRequestError(
                f"{place} is {role[:40]!r}; give one of {', '.join(roles)}", place
            )
    return turned


def _turn(i: int, message: Any, param: str) -> dict[str, Any]:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        place = f"{param}[{i}].role" if isinstance(message, dict) else f"{param}[{i}]"
        raise BadRequestError(f"{param}[{i}] is no message with a role", place)
    content: Any = message.get("content")
    if isinstance(content, list):
        parts = [_text(part, f"{param}[{i}].content[{k}]") for k, part in enumerate(content)]
        return {**message, "content": "".join(parts)}
    if not isinstance(content, str) and (content is not None or not message.get("tool_calls")):
        place = f"{param}[{i}].content"
        raise BadRequestError(f"{param}[{i}].content is neither text nor parts", place)
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


def functions(tools: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The tools; those of a response, whose function is not a part of its own, get one.
    BadRequestError for tools that are no functions."""
    return [_function(tool, f"tools[{i}]") for i, tool in enumerate(tools)]


def _function(tool: dict[str, Any], place: str) -> dict[str, Any]:
    kind = tool.get("type")
    if kind != "function":
        message = f"{place} is of the type {str(kind)[:40]!r}; this server takes 'function' only"
        raise BadRequestError(message, f"{place}.type")
    if "function" not in tool:
        tool = {"type": kind, "function": {n: v for n, v in tool.items() if n != "type"}}
    function = tool["function"]
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise BadRequestError(f"{place} is no function with a name", f"{place}.function")
    return tool
