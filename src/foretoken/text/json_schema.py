"""JSON schemas that llguidance follows exactly: keywords that it misreads are refused, or replaced
by equivalent ones, in place, since references may point anywhere."""

from __future__ import annotations

import json
import math
import re
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any

# Without \u, which would spell a property's name in a second way, past the property's schema
ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
LARGEST = 2**63 - 1024  # the largest float within 64 bits
TINY = -60  # exponent of the number next to zero: regular expressions nest no deeper
LITERAL = {"default", "example", "examples", "required", "x-guidance"}
NAMED = {"properties", "patternProperties", "$defs", "definitions"}  # schemas by name
YEAR = r"^(?:000[1-9]|00[1-9]|0[1-9]|[1-9])"
DAY = (
    r"^....-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])"
    r"|^(?:..(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
SECOND = r"^.{6}[0-5]"  # no leap seconds, which only a few minutes have
# Patterns for what llguidance's own allow; its format `unknown` allows everything
FORMAT_PATTERNS = {
    "date": [YEAR, DAY],
    "time": [SECOND],
    "date-time": [YEAR, DAY, SECOND.replace("6", "17")],
    "unknown": None,
}


def exact_schema(schema: Any, spaces: dict[str, Any]) -> Any:
    """Return an equivalent schema that llguidance follows exactly.

    Args:
        schema: as JSON is parsed.
        spaces: the default of `x-guidance`: which blanks are allowed.

    Raises:
        ValueError: it has no equivalent; the message names the keyword and the remedy.
    """
    if not isinstance(schema, dict):
        return schema
    _require_multiples(json.dumps(schema))
    own = schema.get("x-guidance", spaces)
    return _exact(schema) | {"x-guidance": ESCAPES | own if isinstance(own, dict) else own}


def _exact(schema: Any) -> Any:
    """Rewrite a schema, or a list of them."""
    if isinstance(schema, list):
        return [_exact(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {key: _part(key, value) for key, value in schema.items()}
    _narrow(exact, "minimum", 1)
    _narrow(exact, "maximum", -1)
    if not isinstance(exact.get("items"), list):
        exact.pop("additionalItems", None)  # without meaning here, but it hides prefixItems
    patterns = _format_patterns(exact.get("format"))
    if patterns and isinstance(exact.get("allOf", []), list):
        exact["allOf"] = [*exact.get("allOf", []), *({"pattern": each} for each in patterns)]
    _require_distinct_names(exact)
    return exact


def _part(key: str, value: Any) -> Any:
    """Rewrite a keyword's value."""
    if key in ("const", "enum"):
        _require_numbers(value)
    elif key in NAMED and isinstance(value, dict):
        named = _pattern if key == "patternProperties" else str
        return {named(name): _exact(each) for name, each in value.items()}
    elif key == "pattern" and isinstance(value, str):
        return _pattern(value)
    elif key not in LITERAL:  # unknown keywords too: a reference may point there
        return _exact(value)
    return value


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < math.inf


def _narrow(schema: dict[str, Any], name: str, inside: int) -> None:
    """Replace bounds that llguidance misreads: excluded whole numbers, some of which it allows,
    become included neighbors, and so do those excluded by draft 4's boolean. `inside`: 1 or -1."""
    exclusive = f"exclusive{name.capitalize()}"
    closed, opened = schema.get(name), schema.get(exclusive)
    if isinstance(opened, bool):
        del schema[exclusive]
        closed, opened = (None, closed) if opened else (closed, None)
    bounds = [_near(Decimal(str(closed)), inside)] if _is_number(closed) else []
    if _is_number(opened):
        bound = _near(Decimal(str(opened)), inside)
        if bound == bound.to_integral_value():
            schema.pop(exclusive, None)
            bounds.append(_beside(bound, inside))
        else:
            schema[exclusive] = float(bound)
    if bounds:
        bound = max(bounds) if inside > 0 else min(bounds)
        if abs(bound) > LARGEST:
            problem = f"{name} is {bound:g}, and numbers are held to 64 bits"
            raise ValueError(f"{problem}; give a nearer one")
        schema[name] = int(bound) if bound == bound.to_integral_value() else float(bound)


def _near(bound: Decimal, inside: int) -> Decimal:
    """Return a bound, or the nearest one inside that is parsed without rounding."""
    bound = max(bound, Decimal(-LARGEST)) if inside > 0 else min(bound, Decimal(LARGEST))
    if abs(bound) > LARGEST or _is_exact(bound):
        return bound
    if abs(bound) > 2**53:
        return Decimal(math.nextafter(float(bound), inside * math.inf))
    context = Context(prec=15, rounding=ROUND_CEILING if inside > 0 else ROUND_FLOOR)
    return context.plus(bound)


def _beside(bound: Decimal, inside: int) -> Decimal:
    """Return a number just inside a whole one, and parsed without rounding."""
    digits = min(0, bound.adjusted() - 14) if bound else TINY
    return _near(bound + inside * Decimal(1).scaleb(digits), inside)


def _is_exact(number: Decimal) -> bool:
    """Return True if a JSON parser that rounds the digits before scaling them is exact here."""
    if number == number.to_integral_value():
        return int(number) == float(number)
    _, digits, exponent = number.as_tuple()
    whole = float(int("".join(map(str, digits))))
    return int(exponent) > -300 and whole / 10.0 ** -int(exponent) == abs(float(number))


def _require_numbers(value: Any) -> None:
    """Raise ValueError for a constant with a number that floats or 64 bits cannot represent."""
    if isinstance(value, dict):
        value = list(value.values())
    if isinstance(value, list):
        for each in value:
            _require_numbers(each)
    elif _is_number(value) and (abs(value) > LARGEST or not _is_exact(Decimal(str(value)))):
        raise ValueError(f"the number {value} cannot be held to digit by digit; give a string")


def _require_multiples(text: str) -> None:
    """Raise ValueError if common multiples would overflow, or a divisor is not positive."""
    values = {Fraction(each) for each in re.findall(r'"multipleOf": (-?\d[-+.\deE]*)', text)}
    if any(value <= 0 for value in values):
        raise ValueError("multipleOf is not above 0; give a number above 0")
    if len(values) < 2 or not re.search(r'"(allOf|anyOf|oneOf|\$ref)"', text):
        return
    whole = [int(value * math.lcm(*(each.denominator for each in values))) for value in values]
    if math.lcm(*whole) * max(whole) >= 2**32:
        numbers = ", ".join(str(float(value)) for value in sorted(values))
        raise ValueError(f"multipleOf is {numbers}, too large to hold to together; give one")


def _format_patterns(name: Any) -> list[str]:
    """Return the patterns that strings of a format must match in addition."""
    patterns = FORMAT_PATTERNS.get(name, []) if isinstance(name, str) else []
    if patterns is None:
        raise ValueError(f"format is {name!r}, which is not a format; leave it out")
    return patterns


def _require_distinct_names(schema: dict[str, Any]) -> None:
    """Raise ValueError if several properties are due that `required` does not name: names of
    others may repeat."""
    least, required = schema.get("minProperties"), schema.get("required")
    names = {*map(str, required)} if isinstance(required, list) else set[str]()
    if isinstance(least, int) and least - len(names) > 1:
        raise ValueError(
            f"minProperties is {least} and required names {len(names)}, and others may repeat; "
            "name as many in required, or leave minProperties out"
        )


def _pattern(pattern: str) -> str:
    """Translate a regular expression from ECMA-262, in which sets do not nest and a dot matches no
    line terminator. ValueError if two dashes in a set could mean a difference of sets."""
    dot = "." if re.search(r"\(\?[a-z]*s", pattern) else r"[^\n\r\u2028\u2029]"
    parts, within = list[str](), False
    for part in re.findall(r"\\.|\[\^?|.", pattern, re.DOTALL):
        if within and part == "-" and parts[-1] == "-":
            raise ValueError(f"pattern {pattern!r} has -- within [ ]; write \\- for a dash")
        if within and part[0] in "[&~":
            parts.append(f"\\{part}")
            continue
        parts.append(dot if part == "." and not within else part)
        within = part[0] == "[" or (within and part != "]")
    return "".join(parts)
