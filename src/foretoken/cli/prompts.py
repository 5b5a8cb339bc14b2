"""Prompts from an argument, a file or standard input. A line of a file may hold messages instead,
and options of its own, where a command follows them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli import files
from foretoken.cli.cluster import needing
from foretoken.errors import ForetokenError, InputError, mismatch
from foretoken.sampling.params import WRITABLE, meant
from foretoken.text import chat

if TYPE_CHECKING:
    from foretoken.speculator import Speculator

PLAIN = ("prompt", "id")


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt, or messages in its place, the id of its completion in JSON, options and a seed of
    its own, and where it stands, for errors."""

    prompt: str | list[int]
    id: Any = None
    messages: list[chat.Message] = field(default_factory=list[chat.Message])
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int | None = None
    place: str = ""

    @contextmanager
    def named(self) -> Iterator[None]:
        """An error within says where the line stands."""
        try:
            yield
        except ForetokenError as error:
            if not self.place:
                raise
            raise type(error)(f"{self.place}: {error}") from None


def read(argument: str | None, file: Path | None, *, sampling: bool = False) -> list[Line]:
    """The argument, the lines of the file, or standard input as one prompt. `wishes`: whether lines
    may hold messages and options."""
    if argument is not None and file is not None:
        raise InputError("give a prompt or --prompt-file, not both")
    if file is not None:
        return _from_file(file, sampling)
    if argument is not None:
        return [Line(prompt=argument)]
    try:
        text = "" if sys.stdin is None or sys.stdin.isatty() else sys.stdin.read()
    except UnicodeDecodeError as error:
        raise InputError(f"standard input is no text: {error}") from None
    if not text:
        raise InputError("no prompt; give one as an argument, in a file or on standard input")
    return [Line(prompt=text.removesuffix("\n"))]


def first(file: Path, limit: int | None) -> list[Line]:
    """Read the first `limit` prompts of a file; None: all."""
    if limit is not None and limit < 1:
        raise InputError(f"limit is {limit}; give the number of prompts to use, 1 or more")
    return _from_file(file, sampling=False)[:limit]


def _from_file(file: Path, sampling: bool) -> list[Line]:
    return [parsed() for _, parsed in numbered(file, sampling)]


def numbered(file: Path, sampling: bool) -> list[tuple[int, Callable[[], Line]]]:
    """The lines of a file that are not empty, by their numbers from 1, to be read one by one:
    InputError where one cannot be."""
    rows = _rows(file)
    filled = [(number, row) for number, row in enumerate(rows, 1) if row.strip()]
    if not filled:
        raise InputError(f"{file} holds no prompt; give one on each line")
    if file.suffix not in (".jsonl", ".json", ".parquet"):
        return [(number, partial(Line, prompt=row)) for number, row in filled]
    keys = (*PLAIN, "messages", "seed", *WRITABLE) if sampling else PLAIN
    return [(n, partial(_parse, f"{file}, line {n}", row, keys)) for n, row in filled]


def _rows(file: Path) -> list[str]:
    """The lines of a file; of a Parquet file the rows, as JSON."""
    if file.suffix != ".parquet":
        return [row.removesuffix("\r") for row in files.text(file, "prompts").split("\n")]
    with needing("ray"):
        from foretoken.cluster import table
    return table.lines(file)


def _parse(place: str, row: str, keys: tuple[str, ...]) -> Line:
    from pydantic import ValidationError

    try:
        read = _form().model_validate_json(row)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "line"
        raise InputError(
            f'{place}: {key}: {mismatch(first)}; give {{"prompt": text or ids, "id": anything}}'
        ) from None
    extra = dict(read.model_extra or {})
    seed = extra.pop("seed", None)
    line = Line(read.prompt or "", read.id, read.messages or [], extra, seed, place)
    with line.named():
        _require_keys([*read.model_fields_set, *(read.model_extra or {})], keys)
        if seed is not None:
            from foretoken.options import as_seed  # late: NumPy, which `--help` does without

            as_seed(seed)
        _require_finite({"id": line.id, **line.sampling})
        if line.messages:
            chat.require(line.messages)
        elif not line.prompt:
            raise InputError("the prompt is empty; give text or ids")
    return line


@cache
def _form() -> Any:
    """One line of a JSONL prompt file, whatever other keys it has."""
    from pydantic import ConfigDict, create_model  # late: `--help` and plain text do without it

    return create_model(
        "Line",
        __config__=ConfigDict(extra="allow", strict=True),
        prompt=(str | list[int], None),
        messages=(list[dict[str, Any]], None),
        id=(Any, None),
    )


def _require_keys(names: list[str], keys: tuple[str, ...]) -> None:
    """InputError for keys that there are not, or not together."""
    for key in names:
        if key not in keys:
            near = meant(key, keys)
            remedy = f"did you mean {near}?" if near else f"give some of {', '.join(keys)}"
            raise InputError(f"{key[:40]} is no key of a line here; {remedy}")
    if ("prompt" in names) == ("messages" in names):
        if "prompt" in names:
            raise InputError("there are a prompt and messages; give one of them")
        other = ", or messages" if "messages" in keys else ""
        raise InputError(f"there is no prompt; give one{other}")


def _require_finite(values: dict[str, Any]) -> None:
    for key, value in values.items():
        try:
            json.dumps(value, allow_nan=False)
        except ValueError:
            raise InputError(f"{key}: NaN and Infinity are no JSON") from None


def for_model(line: Line, spec: Speculator) -> str | list[int]:
    """A prompt as the model reads it: without a tokenizer, text must be ids with commas between."""
    if isinstance(line.prompt, list) or spec.tokenizer is not None:
        return line.prompt
    try:
        return [int(part) for part in line.prompt.split(",") if part.strip()]
    except ValueError:
        raise InputError(
            f"the model has no tokenizer, and {line.prompt.strip()[:40]!r} is not "
            "ids separated by commas"
        ) from None
