"""Whatever a grammar allows is valid by its schema, as the package jsonschema sees it: random
schemas of every keyword that is followed, texts drawn from their grammars, and random documents."""

from __future__ import annotations

import decimal
import json
import random
import re
from collections.abc import Callable
from datetime import datetime
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from foretoken.errors import InputError
from schema_texts import allows, matcher, written

NAMES = ["a", "b", "ab", "c", "\t"]
BOUNDS = [0, 0, 0, 1, 1, 2, 5, 10, -1, -2, 0.5, -0.5, 1.5, 2.25, 0.1, -1.5, 10.5, 99, 2**53 + 1]
BOUNDS += [-(2**63), 0.30000000000000004, 1.9999999999999998]
MULTIPLES = [1, 2, 3, 0.5, 0.1, 0.25, 1.5, 10]
PATTERNS = [
    "^a",
    "b$",
    "^[ab]*$",
    "a|b",
    "^.{1,2}$",
    "\\d",
    "^\\w+$",
    "^(a|bc)+$",
]
FORMATS = ["date", "time", "date-time", "uuid", "ipv4", "ipv6", "email"]
TYPES = ["integer", "number", "string", "boolean", "null", "array", "object"]
VALUES = [0, 1, 2, 5, -1, 0.5, -0.5, 1.0, 1.5, 2.25, 0.1, 99, "", "a", "b", "ab", None, True, False]
VALUES += ["\x01", "a\x1b", "\x7f"]
PLAIN = [*VALUES, [], [1, "a"], {"a": 1}, {"b": "a", "a": []}, 2**53 + 2, -0.0]


class Schemas:
    """Draws schemas. Keywords come in any order, as llguidance takes them one behind another."""

    def __init__(self, chance: random.Random) -> None:
        self.chance = chance

    def document(self) -> Any:
        """A whole schema, with what it refers to."""
        schema = self.schema(3)
        if isinstance(schema, dict) and "$ref" in json.dumps(schema):
            # a schema that refers to itself alone has no meaning
            schema["$defs"] = {"x": self.plain(), "y": self.object(1)}
        return schema

    def schema(self, depth: int) -> Any:
        if depth == 0 or self.chance.random() < 0.25:
            return self.leaf()
        return self.chance.choice([self.object, self.array, self.joined, self.mixed])(depth)

    def some(self, share: float, **keywords: Callable[[], Any]) -> dict[str, Any]:
        drawn = {key: make() for key, make in keywords.items() if self.chance.random() < share}
        return self.shuffled(drawn)

    def shuffled(self, schema: dict[str, Any]) -> dict[str, Any]:
        return dict(self.chance.sample(list(schema.items()), len(schema)))

    def leaf(self) -> Any:
        if self.chance.random() < 0.15:
            return {"$ref": self.chance.choice(["#/$defs/x", "#/$defs/y"])}
        return self.plain()

    def plain(self) -> Any:
        kind = self.chance.choice([*TYPES[:5], "number", "string", "enum", "const", "any", "types"])
        if kind in ("integer", "number"):
            return {"type": kind} | self.numbers()
        if kind == "string":
            return {"type": kind} | self.strings()
        if kind == "enum":
            return {"enum": self.chance.sample(PLAIN, self.chance.randint(1, 4))}
        if kind == "const":
            return {"const": self.chance.choice(PLAIN)}
        if kind == "types":
            types = self.chance.sample(TYPES, self.chance.randint(1, 3))
            return self.shuffled({"type": types} | self.numbers() | self.strings())
        return {"type": kind} if kind in TYPES else self.chance.choice([True, {}])

    def numbers(self) -> dict[str, Any]:
        def bound() -> Any:
            return self.chance.choice(BOUNDS)

        lower = self.some(0.35, minimum=bound, exclusiveMinimum=bound)
        upper = self.some(0.35, maximum=bound, exclusiveMaximum=bound)
        return lower | upper | self.some(0.2, multipleOf=lambda: self.chance.choice(MULTIPLES))

    def strings(self) -> dict[str, Any]:
        lengths = self.some(0.3, minLength=self.count, maxLength=self.count)
        pattern = self.some(0.3, pattern=lambda: self.chance.choice(PATTERNS))
        return lengths | pattern | self.some(0.15, format=lambda: self.chance.choice(FORMATS))

    def object(self, depth: int) -> dict[str, Any]:
        def named(names: list[str], most: int) -> dict[str, Any]:
            drawn = self.chance.sample(names, self.chance.randint(1, most))
            return {name: self.schema(depth - 1) for name in drawn}

        return self.shuffled(
            self.some(0.8, type=lambda: "object", properties=lambda: named(NAMES, 3))
            | self.some(0.25, patternProperties=lambda: named(["^a", "b$", "^c", "^x"], 2))
            | self.some(0.6, additionalProperties=lambda: self.closed(depth))
            | self.some(0.5, required=lambda: self.chance.sample(NAMES, self.chance.randint(0, 2)))
            | self.some(0.2, minProperties=self.count, maxProperties=self.count)
        )

    def array(self, depth: int) -> dict[str, Any]:
        items = self.some(0.7, type=lambda: "array", items=lambda: self.closed(depth))
        more = self.some(0.4, prefixItems=lambda: self.several(depth))
        sizes = self.some(0.3, minItems=self.count, maxItems=self.count)
        older = self.some(0.1, additionalItems=lambda: False)
        return self.shuffled(items | more | sizes | older)

    def joined(self, depth: int) -> dict[str, Any]:
        return {self.chance.choice(["anyOf", "oneOf", "allOf"]): self.several(depth)}

    def mixed(self, depth: int) -> dict[str, Any]:
        return self.shuffled(self.object(depth) | self.array(depth) | self.joined(depth))

    def closed(self, depth: int) -> Any:
        return False if self.chance.random() < 0.4 else self.schema(depth - 1)

    def several(self, depth: int) -> list[Any]:
        return [self.schema(depth - 1) for _ in range(self.chance.randint(1, 3))]

    def count(self) -> int:
        return self.chance.randint(0, 3)


def drawn_value(chance: random.Random, depth: int = 3) -> Any:
    kind = chance.random()
    if depth == 0 or kind < 0.6:
        return chance.choice(VALUES)
    if kind < 0.8:
        return [drawn_value(chance, depth - 1) for _ in range(chance.randint(0, 3))]
    names = chance.sample([*NAMES, "x"], chance.randint(0, 3))
    return {name: drawn_value(chance, depth - 1) for name in names}


def is_time(value: object) -> bool:
    short = re.sub(r"\.(\d{1,6})\d*", r".\1", str(value).upper())
    try:
        return not isinstance(value, str) or datetime.fromisoformat(short).tzinfo is not None
    except ValueError:
        return False


def validity(schema: Any) -> Callable[[str], bool]:
    """The independent validator, which compares numbers digit by digit."""
    checker = jsonschema.FormatChecker()
    checker.checks("date-time")(is_time)
    checker.checks("time")(
        lambda value: not isinstance(value, str) or is_time(f"2024-01-01T{value}")
    )
    exact = json.loads(json.dumps(schema), parse_float=decimal.Decimal)
    made = jsonschema.Draft202012Validator(exact, format_checker=checker)
    return lambda text: made.is_valid(json.loads(text, parse_float=decimal.Decimal))


def require(seed: int) -> bool:
    """What the grammar of a schema allows is valid. Tell whether there is one."""
    chance = random.Random(seed)
    schema = Schemas(chance).document()
    try:
        row = matcher(schema)
    except InputError:
        return False
    texts = [written(row, chance) for _ in range(6)]
    documents = [json.dumps(drawn_value(chance), separators=(",", ":")) for _ in range(20)]
    texts += [document for document in documents if allows(row, document)]
    is_valid = validity(schema)
    with decimal.localcontext(prec=1000):
        for text in texts:
            # an exponent of many digits is a number that no validator holds
            if text is not None and not re.search(r"[\d.][eE]", text):
                assert is_valid(text), f"{text} by {json.dumps(schema)}"
    return True


@given(st.integers(0, 2**62))
def test_what_is_allowed_is_valid(seed: int) -> None:
    for i in range(10):
        require(seed + i)


@pytest.mark.prove
@settings(max_examples=1000)
@given(st.integers(0, 2**62))
def test_what_is_allowed_is_valid_of_many_schemas(seed: int) -> None:
    followed = sum(require(seed + i) for i in range(20))
    assert followed > 0  # the odds of none are below 1e-8
