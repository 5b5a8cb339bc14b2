"""Prompts from an argument, a file or standard input."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.errors import InputError

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt, and the id of its completion in JSON."""

    prompt: str | list[int]
    id: Any = None


def read(argument: str | None, file: Path | None) -> list[Line]:
    """The argument, the lines of the file, or standard input as one prompt."""
    if argument is not None and file is not None:
        raise InputError("give a prompt or --prompt-file, not both")
    if file is not None:
        return _from_file(file)
    if argument is not None:
        return [Line(prompt=argument)]
    try:
        text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is no text: {error}") from None
    if not text:
        raise InputError(
            "no prompt; give one as an argument, with --prompt-file or on standard input"
        )
    return [Line(prompt=text.removesuffix("\n"))]


def _from_file(file: Path) -> list[Line]:
    if not file.exists():
        raise InputError(f"{file} cannot be read: there is no such file; give one with prompts")
    try:
        rows = file.read_bytes().decode("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} cannot be read as text in UTF-8: {error}") from None
    rows = [row.removesuffix("\r") for row in rows]
    numbered = [(number, row) for number, row in enumerate(rows, 1) if row.strip()]
    if not numbered:
        raise InputError(f"{file} holds no prompt; give one on each line")
    if file.suffix not in (".jsonl", ".json"):
        return [Line(prompt=row) for _, row in numbered]
    return [_parse(file, number, row) for number, row in numbered]


def _parse(file: Path, number: int, row: str) -> Line:
    from pydantic import ValidationError

    try:
        parsed = _form().model_validate_json(row)
        line = Line(parsed.prompt, parsed.id)
    except ValidationError as error:
        first = error.errors()[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        raise InputError(
            f"{file}, line {number}: {field}: {first['msg']}; "
            'give {"prompt": text or ids, "id": anything}'
        ) from None
    try:
        json.dumps(line.id, allow_nan=False)
    except ValueError:
        raise InputError(f"{file}, line {number}: id: NaN and Infinity are no JSON") from None
    if not line.prompt:
        raise InputError(f"{file}, line {number}: the prompt is empty; give text or ids")
    return line


@cache
def _form() -> Any:
    """One line of a JSONL prompt file; other keys are an error."""
    from pydantic import ConfigDict, create_model  # late: `--help` and plain text do without it

    strict = ConfigDict(extra="forbid", strict=True)
    return create_model("Line", __config__=strict, prompt=(str | list[int], ...), id=(Any, None))


def for_model(lines: list[Line], spec: Speculator) -> list[Line]:
    """As the model reads them: without a tokenizer, text must be ids separated by commas."""
    return lines if spec.tokenizer is not None else [_as_ids(line) for line in lines]


def _as_ids(line: Line) -> Line:
    if isinstance(line.prompt, list):
        return line
    try:
        return Line([int(part) for part in line.prompt.split(",") if part.strip()], line.id)
    except ValueError:
        raise InputError(
            f"the model has no tokenizer, and {line.prompt.strip()[:40]!r} is not "
            "ids separated by commas"
        ) from None
