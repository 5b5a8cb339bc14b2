"""Tools of a request as chat templates read them: functions, in the form of chat completions."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from foretoken.server.api.errors import BadRequestError


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
