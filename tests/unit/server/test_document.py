"""The OpenAPI document is one that clients can be generated from, and holds what is sent."""

from __future__ import annotations

from typing import Any

import pytest

from foretoken.server.app import make
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import EngineClient
from foretoken.server.process.models import ServedModels
from foretoken.server.process.setup import Setup


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    models = ServedModels({"tiny": EngineClient(Setup(None, None))})
    return make(models, ServerOptions("tiny")).openapi()


def references(part: Any) -> list[str]:
    if isinstance(part, list):
        return [found for each in part for found in references(each)]
    if not isinstance(part, dict):
        return []
    own = [part["$ref"]] if isinstance(part.get("$ref"), str) else []
    return own + [found for each in part.values() for found in references(each)]


def test_every_reference_leads_somewhere(document: dict[str, Any]) -> None:
    for reference in references(document):
        found: Any = document
        for name in reference.removeprefix("#/").split("/"):
            found = found[name]


def test_bodies_are_described_as_they_are_checked(document: dict[str, Any]) -> None:
    body = document["paths"]["/v1/chat/completions"]["post"]["requestBody"]
    (schema,) = body["content"].values()
    assert schema == {"schema": {"$ref": "#/components/schemas/Chat"}}
    gamma = document["components"]["schemas"]["Speculation"]["properties"]["gamma"]["anyOf"][0]
    assert gamma == {"minimum": 0, "maximum": 32, "type": "integer"}


def test_errors_are_told_with_their_body(document: dict[str, Any]) -> None:
    answers = document["paths"]["/v1/chat/completions"]["post"]["responses"]
    assert set(answers) == {"200", "4XX", "5XX"}
    assert set(answers["200"]["content"]) == {"application/json", "text/event-stream"}
    fields = document["components"]["schemas"]["ErrorFields"]
    assert fields["required"] == ["message", "type", "param", "code"]


def test_every_form_that_is_taken_is_in_the_document(document: dict[str, Any]) -> None:
    schemas = document["components"]["schemas"]

    def kinds(schema: dict[str, Any]) -> set[str | None]:
        parts = schema.get("anyOf", [])
        return set[str | None]().union(*map(kinds, parts)) if parts else {schema.get("type")}

    def forms(name: str, field: str) -> set[str | None]:
        return kinds(schemas[name]["properties"][field])

    assert forms("Responses", "input") == {"string", "array"}
    assert forms("MessageItem", "content") == {"string", "array"}
    assert {"string", "array"} <= forms("Message", "content")
    assert {"string", "array"} <= forms("Text", "stop")
    assert schemas["Tool"]["required"] == ["type"]  # a response's is its function itself
