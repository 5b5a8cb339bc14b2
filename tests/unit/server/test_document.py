"""The OpenAPI document is one that clients can be generated from, and holds what is sent."""

from __future__ import annotations

from typing import Any

from foretoken.server.app import create_app
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import EngineClient
from foretoken.server.process.fleet import ServedModels
from foretoken.server.process.messages import EngineSetup


def references(part: Any) -> list[str]:
    if isinstance(part, list):
        return [found for each in part for found in references(each)]
    if not isinstance(part, dict):
        return []
    own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
    return own + [found for each in part.values() for found in references(each)]


def kinds(schema: dict[str, Any]) -> set[str | None]:
    parts = schema.get("anyOf", [])
    return set[str | None]().union(*map(kinds, parts)) if parts else {schema.get("type")}


def test_the_document_holds_what_is_taken_and_sent() -> None:
    models = ServedModels({"tiny": EngineClient(EngineSetup(None, None))})
    document = create_app(models, ServerOptions("tiny")).openapi()
    for reference in references(document):  # each leads somewhere
        found: Any = document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]

    chats, schemas = (
        document["paths"]["/v1/chat/completions"]["post"],
        document["components"]["schemas"],
    )
    (schema,) = chats["requestBody"]["content"].values()
    assert schema == {"schema": {"$ref": "#/components/schemas/ChatCompletionRequest"}}
    gamma = schemas["Speculation"]["properties"]["gamma"]["anyOf"][0]
    assert gamma == {"minimum": 0, "maximum": 32, "type": "integer"}
    assert set(chats["responses"]) == {"200", "4XX", "5XX"}
    forms = {"application/json", "text/event-stream"}
    assert set(chats["responses"]["200"]["content"]) == forms
    assert schemas["ErrorFields"]["required"] == ["message", "type", "param", "code"]
    for name, field in (
        ("ResponsesRequest", "input"),
        ("MessageItem", "content"),
        ("Message", "content"),
        ("CompletionRequest", "stop"),
    ):
        assert {"string", "array"} <= kinds(schemas[name]["properties"][field]), name
    assert schemas["Tool"]["required"] == ["type"]  # a response's is its function itself
    form = document["paths"]["/v1/audio/transcriptions"]["post"]["requestBody"]["content"]
    fields = form["multipart/form-data"]["schema"]["properties"]
    assert set(fields) >= {"file", "language", "stream"}
