"""What each prompt's texts are asked for: the command line's options, and over them the line's
own."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from foretoken.cli import prompts
from foretoken.cli.messages import Messages
from foretoken.cli.prompts import Line
from foretoken.errors import ForetokenError, InputError
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


COPY = 2**40  # rows from one text of a line to the next: no file has as many lines


@dataclass(frozen=True, slots=True)
class ModelTask:
    """A prompt, by its number, and its options: as they were given, and checked."""

    number: int
    line: Line
    given: dict[str, Any]
    params: SamplingParams

    @property
    def texts(self) -> int:
        return self.params.num_return_sequences


def tasks(lines: list[Line], options: dict[str, Any]) -> list[ModelTask]:
    """One for each line; an error in a line's own options says where it stands."""
    return [_task(number, line, options | line.sampling) for number, line in enumerate(lines)]


def _task(number: int, line: Line, options: dict[str, Any]) -> ModelTask:
    if not line.sampling:
        return ModelTask(number, line, options, SamplingParams(**options))
    with line.named():
        return ModelTask(number, line, options, SamplingParams(**options))


def numbered(
    file: Path, messages: Messages, options: dict[str, Any]
) -> tuple[dict[int, ModelTask], int]:
    """Those of a file by their lines' numbers, and how many lines are bad, which are told."""
    good, bad = dict[int, ModelTask](), 0
    for number, parsed in prompts.numbered(file, sampling=True):
        try:
            line = messages.wrapped(parsed())
            good[number] = _task(number, line, options | line.sampling)
        except ForetokenError as error:
            bad += 1
            print(f"error: {error}", file=sys.stderr)
    messages.require_used([task.line for task in good.values()])
    return good, bad


def keys(tasks: list[ModelTask], seed: int) -> list[tuple[int, int]]:
    """The key of every prompt's first text: the seed and how many texts come before it; or the
    line's own seed and 0."""
    keys: list[tuple[int, int]] = []
    rows = 0
    for task in tasks:
        line_seed = task.line.seed
        keys.append((seed, rows) if line_seed is None else (line_seed, 0))
        rows += task.texts
    return keys


def key(task: ModelTask, row: int, copy: int, seed: int) -> tuple[int, int]:
    """That of a text that is keyed by its line, whatever the lines before it."""
    line_seed = task.line.seed
    return (seed, row + copy * COPY) if line_seed is None else (line_seed, copy)


def require(tasks: list[ModelTask], spec: Speculator) -> None:
    """InputError or RefusedError for options of a line's own that the model cannot honour."""
    from foretoken.controls.own import require as honoured  # late: torch

    for task in tasks:
        if task.line.sampling:
            with task.line.named():
                honoured(task.params, spec.target, spec.tokenizer is not None)


def require_one(tasks: list[ModelTask]) -> None:
    """InputError where there is more than one text to compare."""
    texts = sum(task.texts for task in tasks)
    if len(tasks) != 1:
        raise InputError(f"--compare takes one prompt, not {len(tasks)}")
    if texts != 1:
        raise InputError(f"--compare takes one text, not num_return_sequences={texts}")
