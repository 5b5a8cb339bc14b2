"""Schemas of which llguidance allows texts that they do not: rewritten, or refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest

from foretoken.errors import InputError
from foretoken.sampling.checks import Structured
from schema_texts import allows, matcher

TYPED = {"properties": {"a": {"type": "string"}}, "additionalProperties": {"type": "integer"}}
BY_PATTERN = {"patternProperties": {"^a": {"type": "string"}}, "type": "object"}
HALVES = {"allOf": [{"exclusiveMinimum": 0}, {"maximum": 0.5}], "type": "number"}
REFERRED = {"$ref": "#/parts/half", "parts": {"half": {"exclusiveMinimum": 0, "maximum": 0.5}}}
CASES: list[tuple[Any, list[str], list[str]]] = [
    # whole bounds that are excluded, in an interval without another whole number
    ({"type": "number", "exclusiveMinimum": 0, "maximum": 0.5}, ["0.5", "0.01"], ["0", "-0"]),
    ({"type": "number", "exclusiveMinimum": 1, "maximum": 1.5}, ["1.5", "1.01"], ["1", "1.0"]),
    ({"type": "number", "exclusiveMinimum": 10, "maximum": 10.5}, ["10.5"], ["10", "10.6"]),
    ({"type": "number", "minimum": -1.5, "exclusiveMaximum": -1}, ["-1.5", "-1.2"], ["-1"]),
    ({"type": "number", "minimum": -0.5, "exclusiveMaximum": 0}, ["-0.5", "-0.1"], ["0", "-0"]),
    ({"minimum": 2, "exclusiveMinimum": True, "maximum": 2.5}, ["2.5", "2.1"], ["2"]),
    ({"minimum": 2, "exclusiveMinimum": False, "maximum": 2.5}, ["2", "2.5"], ["1", "2.6"]),
    (HALVES, ["0.5", "0.01"], ["0"]),
    (REFERRED, ["0.5"], ["0"]),
    ({"type": "integer", "exclusiveMinimum": 0, "exclusiveMaximum": 3}, ["1", "2"], ["0", "3"]),
    # whole numbers that no float is equal to, and those of 64 bits
    ({"type": "integer", "minimum": 2**53 + 1}, [str(2**53 + 2)], [str(2**53)]),
    ({"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}, ["0"], [str(2**64)]),
    ({"type": "integer", "minimum": 0, "maximum": 2**64}, ["0", str(2**62)], ["-1"]),
    ({"const": 2**60}, [str(2**60)], [str(2**60 + 1)]),
    # control characters, which have a spelling where no other names do
    ({"const": "a\x01b"}, ['"a\\u0001b"'], ['"ab"']),
    ({"enum": ["\x1b[0m", "\x7f"]}, ['"\\u001b[0m"', '"\\u007f"'], ['"[0m"', '""']),
    ({"type": "string", "pattern": "^a\\x01b$"}, ['"a\\u0001b"'], ['"ab"']),
    ({"type": "object", "properties": {"a": {"type": "string"}}, "additionalProperties": False},
     ['{"a":"\\u001b[0m"}'], ['{"\\u0061":"x"}', '{"b":1}']),
    ({"type": "object", "properties": {"a": {"pattern": "^[^\\x00-\\x1f]$", "type": "string"}}},
     ['{"a":"b"}'], ['{"a":""}', '{"a":"\\n"}']),
    # divisors of values that have nothing to do with one another
    ({"type": "object", "properties": {
        "price": {"type": "number", "multipleOf": 0.5}, "n": {"anyOf": [{"type": "null"}]},
        "count": {"type": "integer", "multipleOf": 10**6}, "size": {"multipleOf": 65537}}},
     ['{"price":1.5,"n":null,"count":1000000}'], ['{"price":0.3}']),
    ({"type": "integer", "exclusiveMinimum": 0, "maximum": 1.5}, ["1"], ["0", "2"]),
    # a name in a second spelling
    (TYPED, ['{"a":"x"}', '{"b":5}'], ['{"a":5}', '{"\\u0061":5}']),
    (BY_PATTERN, ['{"a":"x"}', '{"b":5}'], ['{"ab":5}', '{"\\u0061b":5}']),
    ({"type": "object", "additionalProperties": True, "properties": {"a": False}},
     ['{"b":5}'], ['{"a":5}', '{"\\u0061":5}']),
    # prefixItems beside a keyword of older drafts
    ({"prefixItems": [{"type": "integer"}], "additionalItems": False, "type": "array"},
     ["[1]", '[1,"a"]'], ['["a"]']),
    ({"items": [{"type": "integer"}], "additionalItems": False}, ["[1]"], ["[1,2]", '["a"]']),
    # days and seconds that there are not
    ({"format": "date", "type": "string"},
     ['"2024-02-29"', '"2000-02-29"', '"2023-02-28"', '"2023-12-31"', '"2023-10-01"'],
     ['"2023-02-29"', '"1900-02-29"', '"0000-01-01"']),
    ({"format": "date-time", "type": "string", "pattern": "Z$"}, ['"2024-02-29T23:59:59Z"'],
     ['"2023-02-29T23:59:59Z"', '"2024-02-29T12:30:60Z"', '"2024-02-29T23:59:59+01:00"']),
    ({"format": "time", "type": "string"}, ['"12:30:59Z"'], ['"12:30:60Z"']),
    # ECMA's regular expressions
    ({"type": "string", "pattern": "^[a&&b]$"}, ['"a"', '"&"', '"b"'], ['"c"']),
    ({"type": "string", "pattern": "^[[:alpha:]]$"}, ['"[]"', '"a]"', '":]"'], ['"b"']),
    ({"type": "string", "pattern": "^[\\w~.-]$"}, ['"a"', '"~"', '"."', '"-"'], ['"!"']),
    ({"type": "string", "pattern": "^.$"}, ['"a"', '"é"'], ['"\\n"', '"\\r"', '"\u2028"', '""']),
    ({"patternProperties": {"^[a~~b]$": False}}, ['{"c":1}'], ['{"a":1}', '{"~":1}']),
]  # fmt: skip


@pytest.mark.parametrize(("schema", "good", "bad"), CASES, ids=lambda value: str(value)[:70])
def test_a_schema_is_followed_to_the_letter(schema: Any, good: list[str], bad: list[str]) -> None:
    made = matcher(schema)
    assert [text for text in good if not allows(made, text)] == []
    assert [text for text in bad if allows(made, text)] == []


@pytest.mark.parametrize(
    ("schema", "message"),
    [
        ({"minProperties": 2, "type": "object"}, "minProperties is 2 but required names only 0"),
        (
            {"const": 2**53 + 1},
            "the number 9007199254740993 cannot .*; leave it out, or give a string",
        ),
        ({"enum": [1, [{"a": 1e20}]]}, "the number 1e\\+20 cannot"),
        (
            {"type": "integer", "minimum": 10**19},
            "minimum is 1.*, which exceeds 64 bits; give a number nearer to 0",
        ),
        ({"type": "string", "format": "unknown"}, "format is 'unknown', which is not a format"),
        ({"type": "string", "pattern": "[+--]"}, "pattern '\\[\\+--\\]' has -- within"),
        ({"type": "integer", "multipleOf": 0}, "multipleOf is not above 0"),
        ({"allOf": [{"multipleOf": 65536}, {"multipleOf": 65538}]}, "multipleOf is 65536.0, 65538"),
        (
            {
                "allOf": [
                    {"properties": {"a": {"multipleOf": 65536}}},
                    {"properties": {"a": {"$ref": "#/$defs/b"}}},
                ],
                "$defs": {"b": {"multipleOf": 65538}},
            },
            "multipleOf is 65536.0, 65538",
        ),
        (
            {"type": "integer", "exclusiveMinimum": 0, "maximum": 0.5},
            r"minimum \(1\) is greater than",
        ),
        (
            {"properties": {"a": {"const": "a\x1b"}}},
            r"the control character '\\x1b' is not supported",
        ),
        ({"properties": {"a": {"enum": [{"\x01": 1}]}}}, "control character"),
        ({"properties": {"a\x01": {}}, "type": "object"}, "control character"),
        ({"properties": {"a": {"pattern": "^a\\x01b$"}}}, "control character"),
        ({"properties": {"a": {"pattern": "^a[\\x7f]b$"}}}, "control character"),
        ({"not": {"type": "string"}}, "Unimplemented keys: .*not"),
        ({"type": "array", "uniqueItems": True}, "Unimplemented keys: .*uniqueItems"),
    ],
    ids=lambda value: str(value)[:50],
)
def test_a_schema_that_cannot_be_followed_is_refused_by_its_keyword(
    schema: Any, message: str
) -> None:
    with pytest.raises(InputError, match=f"^structured's json_schema cannot be .*{message}"):
        matcher(schema)


def test_what_a_schema_says_elsewhere_stays() -> None:
    """Constants, defaults and properties that are named as keywords are."""
    said = {"const": {"additionalItems": 1, "pattern": "[[a]]", "exclusiveMinimum": 3}}
    assert allows(matcher(said), json.dumps(said["const"], separators=(",", ":")))
    schema = {"properties": {"minimum": {"default": {"multipleOf": 3}, "type": "integer"}}}
    assert allows(matcher(schema), '{"minimum":5}')
    assert matcher({"minProperties": 2, "required": ["a"], "type": "object"})


def test_its_own_settings_win() -> None:
    spaced = {
        "type": "object",
        "x-guidance": {"whitespace_flexible": True},
        "properties": {"a": {}},
    }
    made = matcher(spaced)
    assert allows(made, '{ "a" :\n 1 }') and not allows(made, '{"\\u0061":1}')
    assert Structured("json_schema", json.dumps(spaced))
