"""The syntaxes of function calls that chat models use. Each parses calls from text, and writes
rules of a Lark grammar for constrained decoding. The marks around calls are in `formats`."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from keyword import iskeyword
from typing import Any, Protocol

from foretoken.text.json_schema import rewrite_schema

# Separators of JSON in chat templates. As no other separators are allowed, whole keys are forced
# tokens, which need no draft model
CALL_SEPARATORS = {"whitespace_flexible": False, "key_separator": ": ", "item_separator": ", "}
# Keywords that may allow or constrain properties besides those in "properties"
OPEN_OBJECT_KEYWORDS = {
    "additionalProperties",
    "unevaluatedProperties",
    "patternProperties",
    "$ref",
}
OPEN_OBJECT_KEYWORDS |= {"allOf", "anyOf", "oneOf", "if"}
MAX_HEAD_CHARACTERS = 4096  # characters before a call's arguments
ANNOTATION_KEYWORDS = {"type", "title", "description", "$schema", "strict", "examples", "default"}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
QUOTED_STRING_PATTERN = re.compile(r'"(?:[^"\\]|\\.)*"', re.DOTALL)
JSON_STRING_PATTERN = r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"'
JSON_CALL_HEAD = re.compile(
    rf'\s*\{{\s*"name"\s*:\s*{JSON_STRING_PATTERN}\s*,\s*"(?:arguments|parameters)"\s*:\s*(?=\{{)'
)

LiteralWriter = Callable[[str], str]  # string -> grammar symbols; special tokens become tokens


@dataclass(frozen=True, slots=True)
class FunctionSignature:
    """A function that a model may call."""

    name: str
    parameters: dict[str, Any] | None = None  # a JSON schema
    description: str | None = None

    @property
    def schema(self) -> dict[str, Any]:
        """Return the schema of the arguments. Arguments that "properties" does not name are
        forbidden, even if the client left "additionalProperties" out, unless another keyword may
        allow them."""
        schema = NO_PARAMETERS if self.parameters is None else {"type": "object"} | self.parameters
        if "properties" not in schema or schema.keys() & OPEN_OBJECT_KEYWORDS:
            return schema
        return {**schema, "additionalProperties": False}

    @property
    def properties(self) -> dict[str, Any]:
        properties = self.schema.get("properties")
        return properties if isinstance(properties, dict) else {}


@dataclass(frozen=True, slots=True)
class FunctionCall:
    """A function call; `arguments` is a JSON object as a string."""

    name: str
    arguments: str


FunctionSignatures = Mapping[str, FunctionSignature]


class CallForm(Protocol):
    """A syntax of function calls."""

    def parse(self, text: str, functions: FunctionSignatures) -> list[FunctionCall]:
        """Return the calls in `text`. Raises ValueError if `text` contains anything else."""
        ...

    def build_rule(self, function: FunctionSignature, literal: LiteralWriter) -> str:
        """Return the right side of the grammar rule for a call of a function. Raises ValueError if
        this syntax cannot express the function's schema."""
        ...

    def start_stream(self) -> CallStream | None:
        """Return an incremental parser of a call; None if arguments are not written as JSON."""
        ...

    def can_close(self, text: str) -> bool:
        """Return whether a closing mark after `text` ends the calls; a mark within a string does
        not."""
        ...


class CallStream:
    """Parses a call incrementally: its name first, then pieces of its arguments, a JSON object.
    `rest`: the characters after the arguments."""

    def __init__(self, head: re.Pattern[str], *, json_names: bool = False) -> None:
        """`json_names`: whether names are JSON strings."""
        self._head, self._in_json, self._waiting = head, json_names, ""
        self.name: str | None = None
        self.rest = ""
        self._depth, self._quoted, self._escaped, self._over = 0, False, False, False

    def feed(self, text: str) -> str:
        """Append characters; return the new part of the arguments."""
        if self.name is None:
            self._waiting += text
            match = (
                self._head.match(self._waiting)
                if len(self._waiting) < MAX_HEAD_CHARACTERS
                else None
            )
            if match is None:
                return ""
            self.name, text = match[1], self._waiting[match.end() :]
            if self._in_json:
                self.name = json.loads(f'"{self.name}"')
        end = 0 if self._over else self._find_end(text)
        self.rest += text[end:]
        return text[:end]

    def _find_end(self, text: str) -> int:
        """Return the index in `text` at which the arguments end, or len(text) if they continue."""
        for i, letter in enumerate(text):
            if self._quoted:
                self._quoted = letter != '"' or self._escaped
                self._escaped = letter == "\\" and not self._escaped
            elif letter == '"':
                self._quoted = True
            elif letter in "{[":
                self._depth += 1
            elif letter in "]}":
                self._depth -= 1
                if self._depth <= 0:
                    self._over = True
                    return i + (self._depth == 0)
        return len(text)


@dataclass(frozen=True, slots=True)
class JsonForm:
    """`{"name": "f", "arguments": {...}}`: one object, a list of objects, or several objects with a
    separator."""

    key: str = "arguments"  # in grammars; the parser accepts "arguments" and "parameters"
    between: str = ""  # separator of several calls

    def parse(self, text: str, functions: FunctionSignatures) -> list[FunctionCall]:
        calls, rest = list[FunctionCall](), text.strip()
        while rest:
            value, end = json.JSONDecoder().raw_decode(rest)
            each = value if isinstance(value, list) else [value]
            calls += [_parse_object_call(part, functions) for part in each]
            rest = rest[end:].removeprefix(self.between).strip()
        return calls or _raise_no_call(text)

    def build_rule(self, function: FunctionSignature, literal: LiteralWriter) -> str:
        name = json.dumps(function.name, ensure_ascii=False)
        head = f'{{"name": {name}, "{self.key}": '
        return f"{literal(head)} {build_json_rule(function.schema)} {literal('}')}"

    def start_stream(self) -> CallStream | None:
        return CallStream(JSON_CALL_HEAD, json_names=True)

    def can_close(self, text: str) -> bool:
        return not _within_string(text)


@dataclass(frozen=True, slots=True)
class NamedForm:
    """The function's name, a mark, and the arguments in JSON."""

    between: str
    before: str = ""
    after: str = ""
    pattern: str | None = None  # of all text before the arguments, if models vary; group 1: name

    @property
    def head(self) -> re.Pattern[str]:
        before, between = map(re.escape, (self.before, self.between))
        return re.compile(self.pattern or rf"\s*{before}([\w.:-]+){between}\s*(?=\{{)", re.DOTALL)

    def parse(self, text: str, functions: FunctionSignatures) -> list[FunctionCall]:
        match = self.head.match(text)
        if match is None:
            return _raise_no_call(text)
        value, end = json.JSONDecoder().raw_decode(text, match.end())
        if text[end:].strip() not in ("", self.after.strip()) or not isinstance(value, dict):
            return _raise_no_call(text)
        return [FunctionCall(match[1], dump_json(value))]

    def build_rule(self, function: FunctionSignature, literal: LiteralWriter) -> str:
        head = literal(f"{self.before}{function.name}{self.between}")
        after = f" {literal(self.after)}" if self.after else ""
        return f"{head} {build_json_rule(function.schema)}{after}"

    def start_stream(self) -> CallStream | None:
        return CallStream(self.head)

    def can_close(self, text: str) -> bool:
        match = self.head.match(text)
        return match is None or not _within_string(text[match.end() :])


@dataclass(frozen=True, slots=True)
class PythonForm:
    """`[f(a=1, b="x"), g()]`, Python syntax; also accepts `true`, `false` and `null`."""

    def parse(self, text: str, functions: FunctionSignatures) -> list[FunctionCall]:
        try:
            body = ast.parse(text.strip(), mode="eval").body
        except (SyntaxError, RecursionError, MemoryError) as error:
            raise ValueError(str(error)) from None
        parts = body.elts if isinstance(body, ast.List | ast.Tuple) else [body]
        return [self._parse_call(part) for part in parts] or _raise_no_call(text)

    def _parse_call(self, part: ast.expr) -> FunctionCall:
        if not isinstance(part, ast.Call) or part.args or any(k.arg is None for k in part.keywords):
            raise ValueError("it is not a call with named arguments")
        arguments = {str(each.arg): _evaluate_literal(each.value) for each in part.keywords}
        return FunctionCall(ast.unparse(part.func), dump_json(arguments))

    def build_rule(self, function: FunctionSignature, literal: LiteralWriter) -> str:
        names = _require_properties(function, "a call in Python's form")
        for name in (*function.name.split("."), *names):
            if not name.isidentifier() or not name.isascii() or iskeyword(name):
                raise ValueError(f"{name!r} is not a valid name in Python")
        required = set(function.schema.get("required", ()))
        rules = [
            f"{literal(f'{name}=')} {self._build_value_rule(part)}" for name, part in names.items()
        ]
        inner = join_rules(rules, [name in required for name in names], ", ") if rules else ""
        return f"{literal(f'{function.name}(')} {inner} {literal(')')}"

    def _build_value_rule(self, schema: Any) -> str:
        kind = schema.get("type") if isinstance(schema, dict) else None
        if kind == "boolean" and "enum" not in schema and "const" not in schema:
            return '("True" | "False")'
        return '"None"' if kind == "null" else build_json_rule(_require_no_references(schema))

    def start_stream(self) -> CallStream | None:
        return None

    def can_close(self, text: str) -> bool:
        try:
            ast.parse(text.strip(), mode="eval")
        except (SyntaxError, ValueError, RecursionError, MemoryError):
            return not _within_string(text)
        return True


@dataclass(frozen=True, slots=True)
class BareKeysForm:
    """`call:f{key:<|"|>text<|"|>,other:[1,true]}`, Gemma 4's syntax: JSON with bare keys and other
    quotation marks."""

    quote: str = '<|"|>'
    before: str = "call:"

    def parse(self, text: str, functions: FunctionSignatures) -> list[FunctionCall]:
        match = re.match(rf"\s*{self.before}([\w.:-]+)(?=\{{)", text)
        if match is None:
            return _raise_no_call(text)
        parts = text[match.end() :].split(self.quote)
        if len(parts) % 2 == 0:
            raise ValueError("a string has no end")
        keyed = (re.sub(r"(?<=[{,])\s*([\w.-]+)\s*:", r'"\1":', part) for part in parts[::2])
        quoted = (json.dumps(part, ensure_ascii=False) for part in parts[1::2])
        whole = "".join(f"{part}{next(quoted, '')}" for part in keyed)
        return [FunctionCall(match[1], dump_json(json.loads(whole)))]

    def build_rule(self, function: FunctionSignature, literal: LiteralWriter) -> str:
        head = literal(f"{self.before}{function.name}")
        return f"{head} {self._build_object_rule(function.schema, literal)}"

    def _build_object_rule(self, schema: dict[str, Any], literal: LiteralWriter) -> str:
        names = _require_properties(FunctionSignature("an object", schema), "a call with bare keys")
        if not names:
            return literal("{}")
        for name in names:
            _require_name(name, r"[\w.-]+")
        required = set(schema.get("required", ()))
        rules = [
            f"{literal(f'{n}:')} {self._build_value_rule(part, literal)}"
            for n, part in names.items()
        ]
        joined = join_rules(rules, [n in required for n in names], ",")
        return f"{literal('{')} {joined} {literal('}')}"

    def _build_value_rule(self, schema: Any, literal: LiteralWriter) -> str:
        kind = schema.get("type") if isinstance(schema, dict) else None
        if choices := _get_choices(schema) if kind else []:
            return f"({' | '.join(literal(self._spell(each)) for each in choices)})"
        if kind == "string":
            _require_plain(schema)
            return f"{literal(self.quote)} {build_text_until(literal(self.quote))}"
        if kind == "object":
            return self._build_object_rule(schema, literal)
        if kind == "array" and isinstance(schema.get("items"), dict):
            _require_known(schema, {"items"})
            each, comma = self._build_value_rule(schema["items"], literal), literal(",")
            return f"{literal('[')} ({each} ({comma} {each})*)? {literal(']')}"
        if kind in ("integer", "number", "boolean", "null"):
            return build_json_rule(_require_no_references(schema))
        raise ValueError(f"a call with bare keys takes values of one known type, not {schema}")

    def _spell(self, value: Any) -> str:
        if not isinstance(value, str):
            return json.dumps(value)
        if self.quote in value:
            raise ValueError(f"a string cannot contain {self.quote}")
        return f"{self.quote}{value}{self.quote}"

    def start_stream(self) -> CallStream | None:
        return None

    def can_close(self, text: str) -> bool:
        return text.count(self.quote) % 2 == 0


@dataclass(frozen=True, slots=True)
class TaggedForm:
    """The function's name, then each argument between marks. Strings are written verbatim, other
    values as JSON."""

    head: tuple[str, str]  # around the name
    key: tuple[str, str]  # around an argument's name, and before its value
    end: str  # after a value
    after: str = ""

    def parse(self, text: str, functions: FunctionSignatures) -> list[FunctionCall]:
        before, after = (re.escape(mark.strip()) for mark in self.head)
        name = re.match(rf"\s*{before}\s*([^\s<>=]+)\s*{after}", text)
        if name is None:
            return _raise_no_call(text)
        function = functions.get(name[1], FunctionSignature(name[1]))
        opening, closing = (re.escape(mark.strip()) for mark in self.key)
        each = rf"\s*{opening}(.+?){closing}\n?(.*?)\n?{re.escape(self.end.strip())}"
        arguments, rest = {}, text[name.end() :]
        while match := re.match(each, rest, re.DOTALL):
            key = match[1].strip()
            arguments[key] = _parse_value(match[2], function.properties.get(key))
            rest = rest[match.end() :]
        if rest.strip() != self.after.strip():
            return _raise_no_call(text)
        return [FunctionCall(name[1], dump_json(arguments))]

    def build_rule(self, function: FunctionSignature, literal: LiteralWriter) -> str:
        required = set(function.schema.get("required", ()))
        parts = [literal(f"{self.head[0]}{function.name}{self.head[1]}")]
        for name, schema in _require_properties(
            function, "a call whose arguments are between marks"
        ).items():
            _require_name(name, r"[^\s<>]+")
            value = self._build_value_rule(schema, literal)
            part = f"{literal(f'{self.key[0]}{name}{self.key[1]}')} {value}"
            parts.append(part if name in required else f"({part})?")
        return " ".join([*parts, literal(self.after)] if self.after else parts)

    def _build_value_rule(self, schema: Any, literal: LiteralWriter) -> str:
        end = self.end.strip()
        if not _is_string(schema):
            return f"{build_json_rule(_require_no_references(schema))} {literal(self.end)}"
        choices = _get_choices(schema)
        if any(end in str(choice) for choice in choices):
            raise ValueError(f"a string cannot contain {end}")
        if choices:
            return f"({' | '.join(map(literal, choices))}) {literal(self.end)}"
        _require_plain(schema)
        # the first mark ends the string, also within a line
        after = literal(self.end[self.end.index(end) + len(end) :])
        return f"{build_text_until(literal(end))} {after}"

    def start_stream(self) -> CallStream | None:
        return None

    def can_close(self, text: str) -> bool:
        return text.count(self.key[0]) <= text.count(self.end.strip())


def join_rules(rules: list[str], required: list[bool], separator: str) -> str:
    """Return a rule that joins `rules` in their order by separators. The output may leave out rules
    that are not required."""
    mark, first = json.dumps(separator), next((i for i, must in enumerate(required) if must), None)
    if first is None:  # any rule may come first, or none is used
        starts = range(len(rules))
        tails = (" ".join([rules[i], *(f"({mark} {r})?" for r in rules[i + 1 :])]) for i in starts)
        return f"({' | '.join(tails)})?"
    leading = [f"({rule} {mark})?" for rule in rules[:first]]
    following = zip(rules[first + 1 :], required[first + 1 :], strict=True)
    more = [f"({mark} {rule}){'' if must else '?'}" for rule, must in following]
    return " ".join([*leading, rules[first], *more])


def build_json_rule(schema: Any) -> str:
    """Return a grammar symbol for JSON that follows `schema`."""
    return f"%json {json.dumps(rewrite_schema(schema, CALL_SEPARATORS))}"


def dump_json(value: Any) -> str:
    """Return a value as JSON. Raises ValueError if JSON cannot represent it, such as infinity."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False)
    try:
        text.encode()
    except UnicodeEncodeError:  # lone surrogates, which stay escaped
        return json.dumps(value)
    return text


def _parse_object_call(value: Any, functions: FunctionSignatures) -> FunctionCall:
    name = value.get("name") if isinstance(value, dict) else None
    nothing = {} if name in functions else None  # some models leave empty arguments out
    arguments = value.get("arguments", value.get("parameters", nothing)) if name else None
    if isinstance(arguments, str):  # JSON within JSON
        arguments = json.loads(arguments)
    if not isinstance(name, str) or not isinstance(arguments, dict):
        raise ValueError("it is not an object with a name and arguments")
    return FunctionCall(name, dump_json(arguments))


def _within_string(text: str) -> bool:
    """Return whether truncated JSON ends within a string."""
    return '"' in QUOTED_STRING_PATTERN.sub("", text)


def _raise_no_call(text: str) -> list[FunctionCall]:
    raise ValueError(f"there is no call in {text[:40]!r}")


def _evaluate_literal(value: ast.expr) -> Any:
    """Return the value of a Python literal that may use JSON's constants."""
    constants = {"true": True, "false": False, "null": None}
    match value:
        case ast.Name(id=name) if name in constants:
            return constants[name]
        case ast.List(elts=parts) | ast.Tuple(elts=parts):
            return [_evaluate_literal(part) for part in parts]
        case ast.Dict(keys=keys, values=values):
            return {
                str(_evaluate_literal(k)): _evaluate_literal(v)
                for k, v in zip(keys, values, strict=True)
                if k
            }
        case _:
            return ast.literal_eval(value)


def _require_properties(function: FunctionSignature, form: str) -> dict[str, Any]:
    """Return the schemas of a function's arguments by name. Raises ValueError if the function's
    schema has other constraints, which a syntax with separate arguments cannot follow."""
    unsupported = (
        function.schema.keys()
        - {"properties", "required", "additionalProperties"}
        - ANNOTATION_KEYWORDS
    )
    if unsupported:
        raise ValueError(
            f"{form} supports properties only, but {function.name} has {min(unsupported)}"
        )
    required = function.schema.get("required", [])
    if not isinstance(required, list) or not {*map(str, required)} <= function.properties.keys():
        raise ValueError(f"required is {required}; its names must be properties")
    return function.properties


def _is_string(schema: Any) -> bool:
    """Return whether a schema allows only strings, which are written verbatim."""
    return isinstance(schema, dict) and schema.get("type") == "string"


def _parse_value(text: str, schema: Any) -> Any:
    """Return an argument's value: `text` if the schema requires a string or `text` is not valid
    JSON, else the parsed JSON."""
    if _is_string(schema):
        return text
    try:
        return json.loads(text)
    except ValueError:
        return text


def build_text_until(end: str) -> str:
    """Return a grammar symbol for any string up to and including the first occurrence of the
    literal `end`. The string contains no special tokens."""
    if end.startswith('"') and end.count('" ') == 0:
        return f"%lark {{\nstart[suffix={end}]: /(.|\\n)*/\n}}"
    return f"/(.|\\n)*/ {end}"


def _require_plain(schema: dict[str, Any]) -> None:
    if foreign := schema.keys() - ANNOTATION_KEYWORDS:
        raise ValueError(f"a string without quotes cannot have {min(foreign)}")


def _require_known(schema: dict[str, Any], known: set[str]) -> None:
    if foreign := schema.keys() - ANNOTATION_KEYWORDS - known:
        raise ValueError(f"a list in a call with bare keys cannot have {min(foreign)}")


def _require_name(name: str, pattern: str) -> None:
    if not re.fullmatch(pattern, name):
        raise ValueError(f"an argument cannot have the name {name!r}")


def _get_choices(schema: dict[str, Any]) -> list[Any]:
    """Return the values that a schema's `enum` or `const` allows; [] if it has neither."""
    choices = schema.get("enum", [schema["const"]] if "const" in schema else [])
    if not isinstance(choices, list):
        raise ValueError(f"enum is {choices}, which is not a list")
    if choices and (foreign := schema.keys() - ANNOTATION_KEYWORDS - {"enum", "const"}):
        raise ValueError(f"a schema with enum or const cannot have {min(foreign)} too")
    return choices


def _require_no_references(schema: Any) -> Any:
    """Return a schema unchanged. Raises ValueError if it contains a reference."""
    if '"$ref"' in json.dumps(schema):
        raise ValueError("the schema of an argument cannot have a $ref")
    return schema
