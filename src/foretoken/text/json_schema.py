"""Rewrite JSON schemas so that llguidance follows them exactly: keywords that it misinterprets are
refused, or replaced by equivalent keywords. A rewritten schema stays at its place in the document,
as references may point to it."""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator
from decimal import ROUND_CEILING, ROUND_FLOOR, Context, Decimal
from fractions import Fraction
from typing import Any
from urllib.parse import unquote

# All escapes except \u, for objects that may have properties of other names: with \u, the name of a
# declared property could be spelled in a second way, which would avoid the property's schema. With
# these escapes, llguidance does not allow control characters that have no short escape
ALLOWED_ESCAPES = {"json_allowed_escapes": 'nrbtf\\"'}
MAX_NUMBER = 2**63 - 1024  # the largest float within 64 bits
MIN_EXPONENT = -60  # of the smallest number that llguidance's regular expressions support
CONTROL_CHARACTER = re.compile(r"[\x00-\x07\x0b\x0e-\x1f\x7f]")
REGEX_CHARACTER = re.compile(
    r"\\x[0-9a-fA-F]{2}|\\u[0-9a-fA-F]{4}|\\c[A-Za-z]|\\.|\[\^?|.", re.DOTALL
)
MAX_SCHEMA_GROUPS = 1000  # groups of schemas whose divisors are checked together
LITERAL_KEYWORDS = {"default", "example", "examples", "required", "x-guidance"}
# Keywords whose values are schemas by name
NAMED_SCHEMA_KEYWORDS = {"properties", "patternProperties", "$defs", "definitions"}
YEAR_PATTERN = r"^(?:000[1-9]|00[1-9]|0[1-9]|[1-9])"
DAY_PATTERN = (
    r"^....-(?:0[13-9]|1[0-2]|02-[01]|02-2[0-8])"
    r"|^(?:..(?:0[48]|[2468][048]|[13579][26])|(?:[02468][048]|[13579][26])00)-02-29"
)
SECOND_PATTERN = r"^.{6}[0-5]"  # no leap seconds, which are valid in a few minutes only
# Added if llguidance's own pattern of a format is too loose; the format `unknown` allows everything
FORMAT_PATTERNS = {
    "date": [YEAR_PATTERN, DAY_PATTERN],
    "time": [SECOND_PATTERN],
    "date-time": [YEAR_PATTERN, DAY_PATTERN, SECOND_PATTERN.replace("6", "17")],
    "unknown": None,
}


def rewrite_schema(schema: Any, spaces: dict[str, Any]) -> Any:
    """Return an equivalent schema that llguidance follows exactly.

    Args:
        schema: parsed JSON.
        spaces: llguidance's options `x-guidance` (the allowed whitespace) if the schema has none.

    Raises:
        ValueError: there is no equivalent schema; the message names the keyword and the remedy.
    """
    if not isinstance(schema, dict):
        return schema
    schemas = list(_iter_subschemas(schema))
    _require_multiples(schema, schemas)
    own, escapes = schema.get("x-guidance", spaces), {}
    if any(_allows_other_names(each) for each in schemas):
        escapes = ALLOWED_ESCAPES
        for each in schemas:
            _require_writable(each)
    return _rewrite(schema) | {"x-guidance": escapes | own if isinstance(own, dict) else own}


def _iter_subschemas(schema: Any) -> Iterator[dict[str, Any]]:
    """Yield a schema and all schemas within it, even at unknown keywords, as a reference may point
    there."""
    if isinstance(schema, list):
        for each in schema:
            yield from _iter_subschemas(each)
    elif isinstance(schema, dict):
        yield schema
        for key, value in schema.items():
            if key in NAMED_SCHEMA_KEYWORDS and isinstance(value, dict):
                yield from _iter_subschemas(list(value.values()))
            elif key not in LITERAL_KEYWORDS | {"const", "enum"}:
                yield from _iter_subschemas(value)


def _allows_other_names(schema: dict[str, Any]) -> bool:
    """Return whether a schema allows properties that it does not name."""
    named = "properties" in schema or "patternProperties" in schema
    return named and schema.get("additionalProperties") is not False


def _require_writable(schema: dict[str, Any]) -> None:
    """Raise ValueError for a required control character, which ALLOWED_ESCAPES cannot spell."""
    named = [schema.get("const"), schema.get("enum"), schema.get("required")]
    strings = [*_iter_strings([*named, dict.fromkeys(schema.get("properties") or {})])]
    pattern = schema.get("pattern")
    strings += [_find_literals(pattern)] if isinstance(pattern, str) else []
    for text in strings:
        if found := CONTROL_CHARACTER.search(text):
            raise ValueError(
                f"the control character {found[0]!r} is not supported in a schema that allows "
                "additional properties; set additionalProperties to false, or leave the character "
                "out"
            )


def _iter_strings(value: Any) -> Iterator[str]:
    """Yield the strings in a JSON value, names of properties included."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, list | dict):
        for each in value:
            yield from _iter_strings(each)
        if isinstance(value, dict):
            yield from _iter_strings(list(value.values()))


def _find_literals(pattern: str) -> str:
    """Return the characters that a regular expression names one by one. Characters in ranges and in
    excluding sets are left out, because a match need not contain them."""
    literals, within, excluding = list[str](), False, False
    parts = REGEX_CHARACTER.findall(pattern)
    for i, part in enumerate(parts):
        if within and part == "]":
            within = False
        elif not within and part[0] == "[":
            within, excluding = True, part == "[^"
        elif not within or not (excluding or "-" in parts[i - 1 : i + 2]):
            literals.append(_unescape_character(part))
    return "".join(literals)


def _unescape_character(part: str) -> str:
    """Return the character that an escape in a regular expression stands for; return any other part
    unchanged."""
    if part == "\\0":
        return "\0"
    if len(part) > 2:
        return chr(ord(part[2].upper()) - 64 if part[1] == "c" else int(part[2:], 16))
    return part


def _rewrite(schema: Any) -> Any:
    if isinstance(schema, list):
        return [_rewrite(each) for each in schema]
    if not isinstance(schema, dict):
        return schema
    exact = {key: _rewrite_keyword(key, value) for key, value in schema.items()}
    _narrow_bounds(exact, "minimum", 1)
    _narrow_bounds(exact, "maximum", -1)
    if not isinstance(exact.get("items"), list):
        exact.pop("additionalItems", None)  # has no effect here, but hides prefixItems
    patterns = _get_format_patterns(exact.get("format"))
    if patterns and isinstance(exact.get("allOf", []), list):
        exact["allOf"] = [*exact.get("allOf", []), *({"pattern": each} for each in patterns)]
    _require_distinct_names(exact)
    return exact


def _rewrite_keyword(key: str, value: Any) -> Any:
    if key in ("const", "enum"):
        _require_numbers(value)
    elif key in NAMED_SCHEMA_KEYWORDS and isinstance(value, dict):
        named = _translate_pattern if key == "patternProperties" else str
        return {named(name): _rewrite(each) for name, each in value.items()}
    elif key == "pattern" and isinstance(value, str):
        return _translate_pattern(value)
    elif key not in LITERAL_KEYWORDS:  # unknown keywords too: a reference may point there
        return _rewrite(value)
    return value


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and abs(value) < math.inf


def _narrow_bounds(schema: dict[str, Any], name: str, inside: int) -> None:
    """Replace exclusive bounds that llguidance misinterprets by inclusive bounds at the nearest
    allowed number. llguidance allows some whole numbers that are exclusive bounds, and
    misinterprets the boolean exclusiveMinimum of JSON schema draft 4. `inside`: the direction of
    the allowed numbers, 1 for a minimum and -1 for a maximum."""
    exclusive = f"exclusive{name.capitalize()}"
    closed, opened = schema.get(name), schema.get(exclusive)
    if isinstance(opened, bool):
        del schema[exclusive]
        closed, opened = (None, closed) if opened else (closed, None)
    bounds = [_round_inside(Decimal(str(closed)), inside)] if _is_number(closed) else []
    if _is_number(opened):
        bound = _round_inside(Decimal(str(opened)), inside)
        if bound == bound.to_integral_value():
            schema.pop(exclusive, None)
            whole = schema.get("type") == "integer"
            bounds.append(bound + inside if whole else _step_inside(bound, inside))
        else:
            schema[exclusive] = float(bound)
    if bounds:
        bound = max(bounds) if inside > 0 else min(bounds)
        if abs(bound) > MAX_NUMBER:
            problem = f"{name} is {bound:g}, which exceeds 64 bits"
            raise ValueError(f"{problem}; give a number nearer to 0")
        schema[name] = int(bound) if bound == bound.to_integral_value() else float(bound)


def _round_inside(bound: Decimal, inside: int) -> Decimal:
    """Return the bound or, if a JSON parser rounds it, the nearest number on its inner side that is
    parsed without rounding."""
    bound = max(bound, Decimal(-MAX_NUMBER)) if inside > 0 else min(bound, Decimal(MAX_NUMBER))
    if abs(bound) > MAX_NUMBER or _is_exact(bound):
        return bound
    if abs(bound) > 2**53:
        return Decimal(math.nextafter(float(bound), inside * math.inf))
    context = Context(prec=15, rounding=ROUND_CEILING if inside > 0 else ROUND_FLOOR)
    return context.plus(bound)


def _step_inside(bound: Decimal, inside: int) -> Decimal:
    """Return a number next to the whole number `bound`, on its inner side, that is parsed without
    rounding."""
    digits = min(0, bound.adjusted() - 14) if bound else MIN_EXPONENT
    return _round_inside(bound + inside * Decimal(1).scaleb(digits), inside)


def _is_exact(number: Decimal) -> bool:
    """Return whether a parser that rounds digits before scaling parses this number exactly."""
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
    elif _is_number(value) and (abs(value) > MAX_NUMBER or not _is_exact(Decimal(str(value)))):
        raise ValueError(
            f"the number {value} cannot be represented exactly; leave it out, or give a string"
        )


def _require_multiples(root: dict[str, Any], schemas: list[dict[str, Any]]) -> None:
    """Raise ValueError if a multipleOf is not above 0, or if common multiples would overflow."""
    if any(_is_number(each.get("multipleOf")) and each["multipleOf"] <= 0 for each in schemas):
        raise ValueError("multipleOf is not above 0; give a number above 0")
    if sum("multipleOf" in each for each in schemas) > 1:
        _require_common_multiples(root, [root], set())


def _require_common_multiples(
    root: dict[str, Any], schemas: list[dict[str, Any]], seen: set[frozenset[int]]
) -> None:
    """Raise ValueError if the divisors (multipleOf) of one value, or of a value within it, have too
    large a common multiple. `schemas`: all schemas that the value must match; `seen`: the groups of
    schemas that were checked before."""
    group = _collect_schemas(root, schemas)
    if (key := frozenset(group)) in seen:
        return
    seen.add(key)
    if len(seen) > MAX_SCHEMA_GROUPS:
        raise ValueError("multipleOf is in too many combined schemas; leave multipleOf out")
    values = {Fraction(str(each["multipleOf"])) for each in group.values() if _has_divisor(each)}
    whole = [int(value * math.lcm(*(each.denominator for each in values))) for value in values]
    if len(values) > 1 and math.lcm(*whole) * max(whole) >= 2**32:
        numbers = ", ".join(str(float(value)) for value in sorted(values))
        raise ValueError(
            f"multipleOf is {numbers}, and the common multiple is too large; give one multipleOf"
        )
    within: dict[str, list[Any]] = defaultdict(list)
    for each in group.values():
        for name, schema in (each.get("properties") or {}).items():
            within[f"property {name}"].append(schema)
        within["others"] += (each.get("patternProperties") or {}).values()
        within["others"].append(each.get("additionalProperties"))
        items = each.get("items"), each.get("prefixItems"), each.get("additionalItems")
        within["items"] += [x for one in items for x in (one if isinstance(one, list) else [one])]
    others = within.pop("others", [])
    for name, parts in within.items():
        found = parts + others * name.startswith("property")
        _require_common_multiples(root, [x for x in found if isinstance(x, dict)], seen)
    _require_common_multiples(root, [x for x in others if isinstance(x, dict)], seen)


def _collect_schemas(
    root: dict[str, Any], schemas: list[dict[str, Any]]
) -> dict[int, dict[str, Any]]:
    """Return, by id(), the schemas and all schemas that they combine (allOf, anyOf, oneOf) or refer
    to ($ref)."""
    group, waiting = dict[int, dict[str, Any]](), [*schemas]
    while waiting:
        schema = waiting.pop()
        if id(schema) in group:
            continue
        group[id(schema)] = schema
        for key in ("allOf", "anyOf", "oneOf"):
            parts = schema.get(key)
            waiting += [x for x in parts if isinstance(x, dict)] if isinstance(parts, list) else []
        reference = schema.get("$ref")
        if isinstance(reference, str) and isinstance(
            found := _resolve_reference(root, reference), dict
        ):
            waiting.append(found)
    return group


def _resolve_reference(root: Any, reference: str) -> Any:
    """Return the part of the document that a reference points to; None if there is no such part."""
    if not reference.startswith("#"):
        return None
    for part in filter(None, unquote(reference[1:]).split("/")):
        part = part.replace("~1", "/").replace("~0", "~")
        if isinstance(root, list) and part.isdigit() and int(part) < len(root):
            root = root[int(part)]
        elif isinstance(root, dict):
            root = root.get(part)
        else:
            return None
    return root


def _has_divisor(schema: dict[str, Any]) -> bool:
    return _is_number(schema.get("multipleOf"))


def _get_format_patterns(name: Any) -> list[str]:
    """Return the patterns to add for strings of a format. Raises ValueError for a name for which
    llguidance allows any string."""
    patterns = FORMAT_PATTERNS.get(name, []) if isinstance(name, str) else []
    if patterns is None:
        raise ValueError(f"format is {name!r}, which is not a format; leave format out")
    return patterns


def _require_distinct_names(schema: dict[str, Any]) -> None:
    """Raise ValueError if minProperties requires two or more properties that `required` does not
    name: llguidance could give both the same name."""
    min_properties, required = schema.get("minProperties"), schema.get("required")
    names = {*map(str, required)} if isinstance(required, list) else set[str]()
    if isinstance(min_properties, int) and min_properties - len(names) > 1:
        raise ValueError(
            f"minProperties is {min_properties} but required names only {len(names)}, so that "
            f"other names could repeat; name {min_properties} in required, or leave minProperties "
            "out"
        )


def _translate_pattern(pattern: str) -> str:
    """Translate a regular expression for llguidance from ECMA-262, in which sets do not nest and a
    dot matches no line terminator. Raises ValueError if two dashes in a set could mean a difference
    of sets."""
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
