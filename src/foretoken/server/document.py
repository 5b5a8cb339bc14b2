"""The OpenAPI document: what a route reads, and with which statuses and bodies it answers."""

from __future__ import annotations

from typing import Any

from foretoken.server.api.wire import Wire

SAID = {
    400: "Something in the request is not honoured; `param` names it.",
    401: "The API key is missing or wrong.",
    404: "Another model than the one that is served.",
    413: "The body is larger than this server takes.",
    429: "The queue is full; `Retry-After` says when to send it again.",
    500: "A step failed.",
    503: "There is no engine now; `Retry-After` says when to send it again.",
}
TEXT = {"anyOf": [{"type": "string"}, {"type": "null"}]}
ERROR = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": TEXT,
                "code": TEXT,
            },
        }
    },
}

STATES: dict[int | str, dict[str, Any]] = {503: {"description": "There is no engine now."}}


def post(kind: type[Wire], *, streams: bool = False) -> dict[str, Any]:
    """Return the OpenAPI document of a route that reads such a body, as FastAPI takes it;
    `streams`: it answers with server-sent events where the body asks for them."""
    schema = kind.model_json_schema()
    parts = schema.pop("$defs", {})
    body = {"required": True, "content": _json(_whole(schema, parts))}
    good: dict[str, Any] = {"description": "The answer.", "content": _json({"type": "object"})}
    if streams:
        good["content"]["text/event-stream"] = {"schema": {"type": "string"}}
    return {"openapi_extra": {"requestBody": body}, "responses": {200: good} | errors(*SAID)}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """OpenAI's error body under each of them. As FastAPI takes them."""
    return {n: {"description": SAID[n], "content": _json(ERROR)} for n in statuses}


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}


def _whole(schema: Any, parts: dict[str, Any]) -> Any:
    """A schema with its parts in place: references within it mean nothing within a document."""
    if isinstance(schema, list):
        return [_whole(each, parts) for each in schema]
    if not isinstance(schema, dict):
        return schema
    rest = {name: _whole(value, parts) for name, value in schema.items() if name != "$ref"}
    reference = schema.get("$ref")
    return rest if reference is None else _whole(parts[reference.rsplit("/", 1)[1]], parts) | rest
