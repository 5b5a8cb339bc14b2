"""What each prompt's texts are asked for: the command line's wishes, and over them the line's
own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from foretoken.cli.prompts import Line
from foretoken.errors import InputError
from foretoken.sampling.params import SamplingParams

if TYPE_CHECKING:
    from foretoken.speculator import Speculator


@dataclass(frozen=True, slots=True)
class Task:
    """A prompt, by its number, and its wishes: as they were given, and checked."""

    number: int
    line: Line
    given: dict[str, Any]
    params: SamplingParams

    @property
    def texts(self) -> int:
        return self.params.num_return_sequences


def tasks(lines: list[Line], given: dict[str, Any]) -> list[Task]:
    """One for each line; an error in a line's own wishes says where it stands."""
    return [_task(number, line, given | line.wishes) for number, line in enumerate(lines)]


def _task(number: int, line: Line, given: dict[str, Any]) -> Task:
    if not line.wishes:
        return Task(number, line, given, SamplingParams(**given))
    with line.named():
        return Task(number, line, given, SamplingParams(**given))


def require(tasks: list[Task], spec: Speculator) -> None:
    """InputError or RefusedError for wishes of a line's own that the model cannot honour."""
    from foretoken.controls.required import require as honoured  # late: torch

    for task in tasks:
        if task.line.wishes:
            with task.line.named():
                honoured(task.params, spec.target, spec.tokenizer is not None)


def require_one(tasks: list[Task]) -> None:
    """InputError where there is more than one text to compare."""
    texts = sum(task.texts for task in tasks)
    if len(tasks) != 1:
        raise InputError(f"--compare takes one prompt, not {len(tasks)}")
    if texts != 1:
        raise InputError(f"--compare takes one text, not num_return_sequences={texts}")
