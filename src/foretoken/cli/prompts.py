"""Prompts from an argument, a file or standard input, and the sampling params of each.

A line of a file may hold messages instead of a prompt, and options of its own where a command
follows them; these win over the command line's.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli.cluster import needing
from foretoken.errors import ForetokenError, InputError, mismatch
from foretoken.sampling.params import WRITABLE, SamplingParams, meant
from foretoken.storage.files import read_text
from foretoken.text import chat

if TYPE_CHECKING:
    from foretoken.cli.messages import Messages
    from foretoken.speculator import Speculator

COPY = 2**40  # rows from one text of a line to the next: no file has as many lines
PLAIN = ("prompt", "id")


@dataclass(frozen=True, slots=True)
class Line:
    """A prompt or messages, with its own options, seed, and the id of its completion in JSON."""

    prompt: str | list[int]
    id: Any = None
    messages: list[chat.Message] = field(default_factory=list[chat.Message])
    sampling: dict[str, Any] = field(default_factory=dict[str, Any])
    seed: int | None = None
    place: str = ""  # in its file, for errors

    @contextmanager
    def named(self) -> Iterator[None]:
        """Prefix errors raised within by the line's place."""
        try:
            yield
        except ForetokenError as error:
            if not self.place:
                raise
            raise type(error)(f"{self.place}: {error}") from None


def read(argument: str | None, file: Path | None, *, sampling: bool = False) -> list[Line]:
    """Read the argument, the lines of a file, or standard input as one prompt.

    options: lines may hold messages and options of their own.
    """
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
    """Return the lines of a file that are not empty, with their numbers from 1.

    Each is a function that parses the line; it raises InputError for a bad one.
    """
    rows = _rows(file)
    filled = [(number, row) for number, row in enumerate(rows, 1) if row.strip()]
    if not filled:
        raise InputError(f"{file} holds no prompt; give one on each line")
    if file.suffix not in (".jsonl", ".json", ".parquet"):
        return [(number, partial(Line, prompt=row)) for number, row in filled]
    keys = (*PLAIN, "messages", "seed", *WRITABLE) if sampling else PLAIN
    return [(n, partial(_parse, f"{file}, line {n}", row, keys)) for n, row in filled]


def _rows(file: Path) -> list[str]:
    """Return the lines of a file; of a Parquet file the rows, as JSON."""
    if file.suffix != ".parquet":
        return [row.removesuffix("\r") for row in read_text(file, "prompts").split("\n")]
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
    """Make the model of a line of JSONL; other keys are checked later."""
    from pydantic import ConfigDict, create_model  # late: `--help` and plain text do without it

    return create_model(
        "Line",
        __config__=ConfigDict(extra="allow", strict=True),
        prompt=(str | list[int], None),
        messages=(list[dict[str, Any]], None),
        id=(Any, None),
    )


def _require_keys(names: list[str], keys: tuple[str, ...]) -> None:
    """Raise InputError for unknown keys, and for both or neither of prompt and messages."""
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
    """Return the prompt; without a tokenizer, its text is read as ids with commas between."""
    if isinstance(line.prompt, list) or spec.tokenizer is not None:
        return line.prompt
    try:
        return [int(part) for part in line.prompt.split(",") if part.strip()]
    except ValueError:
        raise InputError(
            f"the model has no tokenizer, and {line.prompt.strip()[:40]!r} is not "
            "ids separated by commas"
        ) from None


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A prompt with its number, and its options as they were given and as sampling params."""

    number: int
    line: Line
    given: dict[str, Any]
    params: SamplingParams

    @property
    def texts(self) -> int:
        return self.params.num_return_sequences


def tasks(lines: list[Line], options: dict[str, Any]) -> list[ModelTask]:
    """Make a task of each line. An error in a line's own options says where it stands."""
    return [_task(number, line, options | line.sampling) for number, line in enumerate(lines)]


def _task(number: int, line: Line, options: dict[str, Any]) -> ModelTask:
    if not line.sampling:
        return ModelTask(number, line, options, SamplingParams(**options))
    with line.named():
        return ModelTask(number, line, options, SamplingParams(**options))


def tasks_of_file(
    file: Path, messages: Messages, options: dict[str, Any]
) -> tuple[dict[int, ModelTask], int]:
    """Read the tasks of a file, by their lines' numbers; tell and count the bad lines."""
    good, bad = dict[int, ModelTask](), 0
    for number, parsed in numbered(file, sampling=True):
        try:
            line = messages.wrapped(parsed())
            good[number] = _task(number, line, options | line.sampling)
        except ForetokenError as error:
            bad += 1
            print(f"error: {error}", file=sys.stderr)
    messages.require_used([task.line for task in good.values()])
    return good, bad


def keys(tasks: list[ModelTask], seed: int) -> list[tuple[int, int]]:
    """Return the random key of each prompt's first text.

    It is the seed and the number of texts before it, or the line's own seed and 0.
    """
    keys: list[tuple[int, int]] = []
    rows = 0
    for task in tasks:
        line_seed = task.line.seed
        keys.append((seed, rows) if line_seed is None else (line_seed, 0))
        rows += task.texts
    return keys


def key(task: ModelTask, row: int, copy: int, seed: int) -> tuple[int, int]:
    """Return the random key of a text by its line's number, whatever the lines before it hold."""
    line_seed = task.line.seed
    return (seed, row + copy * COPY) if line_seed is None else (line_seed, copy)


def require(tasks: list[ModelTask], spec: Speculator) -> None:
    """Raise InputError or RefusedError for a line's own options that the model cannot honour."""
    from foretoken.controls.own import require as honoured  # late: torch

    for task in tasks:
        if task.line.sampling:
            with task.line.named():
                honoured(task.params, spec.target, spec.tokenizer is not None)


def require_one(tasks: list[ModelTask]) -> None:
    """Raise InputError where there is more than one text to compare."""
    texts = sum(task.texts for task in tasks)
    if len(tasks) != 1:
        raise InputError(f"--compare takes one prompt, not {len(tasks)}")
    if texts != 1:
        raise InputError(f"--compare takes one text, not num_return_sequences={texts}")
