"""Texts under JSON schemas: every one parses and validates, in batches, whatever model writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any

import jsonschema
import pytest

from foretoken import SamplingParams, Speculator, load
from tiny import byte_level, llama, t5

MOST = 900  # tokens: models that know no JSON write a character at a time


def text(most: int = 12, **more: Any) -> dict[str, Any]:
    return {"type": "string", "maxLength": most} | more


def whole(least: int = 0, most: int = 999) -> dict[str, Any]:
    return {"type": "integer", "minimum": least, "maximum": most}


def listed(items: Any, most: int = 3, least: int = 0) -> dict[str, Any]:
    return {"type": "array", "items": items, "minItems": least, "maxItems": most}


def entity(optional: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    required = [name for name in properties if name not in optional]
    kind = {"type": "object", "properties": properties, "required": required}
    return kind | {"additionalProperties": False}


# After those that applications use. Every part has bounds, so that a text comes to an end whatever
# writes it
TIME = {"type": "string", "pattern": "^([01][0-9]|2[0-3]):[0-5][0-9]$"}
SLUG = {"type": "string", "pattern": "^[a-z][a-z0-9-]{1,10}$"}
MONEY = entity(amount=whole(0, 99999), currency={"enum": ["EUR", "USD"]})
POINT = entity(type={"const": "Point"}, coordinates=listed(whole(-90, 90), 2, 2))
ERROR = entity(kind={"const": "error"}, message=text())
SCHEMAS: dict[str, dict[str, Any]] = {
    "order": entity(id=whole(1), items=listed(SLUG, 3, 1), total=MONEY, paid={"type": "boolean"}),
    "event": entity(("end",), title=text(), start=TIME, end=TIME),
    "setting": entity(key=SLUG, value={"anyOf": [{"type": "boolean"}, whole(), text()]}),
    "node": entity(("next",), id=whole(), next={"anyOf": [{"type": "null"}, entity(id=whole())]}),
    "point list": listed(POINT, 2, 1),
    "pair": {"$defs": {"m": MONEY}}
    | entity(first={"$ref": "#/$defs/m"}, second={"$ref": "#/$defs/m"}),
    "result": {"oneOf": [entity(kind={"const": "value"}, value=POINT), ERROR]},
    "answer": entity(steps=listed(text(20), 3), result={"anyOf": [whole(-99, 99), text(8)]}),
}


def decoder() -> Speculator:
    return load()


def encoder_decoder() -> Speculator:
    """Random weights: it has no idea of JSON."""
    return load(t5(320), "lookup", tokenizer=byte_level(), runtime="transformers")


def blanks(text: str) -> int:
    """Characters of white space outside strings."""
    return sum(map(str.isspace, re.sub(r'"(\\.|[^"\\])*"', "", text)))


@pytest.mark.parametrize("make", [decoder, encoder_decoder])
def test_texts_are_valid_by_their_schemas(make: Callable[[], Speculator]) -> None:
    """In a batch, greedy and sampled rows mixed."""
    params = [
        SamplingParams(float(j % 2), max_new_tokens=MOST, structured={"json_schema": schema})
        for j, schema in enumerate(SCHEMAS.values())
    ]
    texts = make().generate([f"A {name}: " for name in SCHEMAS], params, gamma=3, seed=0)
    for (name, schema), out in zip(SCHEMAS.items(), texts, strict=True):
        assert out.finish_reason == "stop", f"{name}: {out.text!r}"
        value = json.loads(out.text or "")
        jsonschema.validate(value, schema)
        assert blanks(out.text or "") <= blanks(json.dumps(value)), out.text


@pytest.mark.parametrize(
    "own", [None, {"whitespace_flexible": True}, {"whitespace_pattern": "[ ]{0,3}"}]
)
def test_blanks_between_the_parts_of_a_document(own) -> None:
    """At most one behind a colon or a comma; a schema may ask for more."""
    spec, schema = encoder_decoder(), {"type": "array", "items": {"const": 1}, "minItems": 6}
    schema |= {"maxItems": 6} | ({} if own is None else {"x-guidance": own})
    params = SamplingParams(1.3, max_new_tokens=400, structured={"json_schema": schema})
    texts = [out.text or "" for out in spec.generate(["A"] * 6, params, gamma=3, seed=1)]
    tight = re.compile(r"\[1(, ?1){5}\]")
    assert all(bool(tight.fullmatch(text)) for text in texts) == (own is None), texts


def test_forced_tokens_need_no_draft() -> None:
    """They are drafted where gamma is chosen, and the text is that of plain decoding."""
    target = llama(320, 400)
    spec = load(target, "none", tokenizer=byte_level(), runtime="transformers", dtype="float64")
    schema = {"const": {"a rather long key of an object": "and all of its only value"}}
    params = SamplingParams(0.0, max_new_tokens=200, structured={"json_schema": schema})
    plain, chosen = (spec.generate("A", params, gamma=gamma)[0] for gamma in (0, None))
    assert chosen.text == plain.text and json.loads(plain.text or "") == schema["const"]
    assert plain.stats.drafted == 0 < chosen.stats.accepted
    assert chosen.stats.target_calls < plain.stats.target_calls
