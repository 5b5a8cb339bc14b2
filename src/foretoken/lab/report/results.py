"""The file of a report's measurements: a JSON line each, written as soon as it is done.

What is in it is not measured again. A kill or a full disk loses one measurement at most.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from foretoken.lab.experiments.experiment import Case, Row
from foretoken.storage import files


class Line(BaseModel):
    """One measurement. `of`: a digest of what it depends on: recipe, weights and machine."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipe: str
    of: str
    experiment: str
    case: Case
    seconds: float
    result: dict[str, Any] = {}
    failed: str | None = None
    machine: str = "not recorded"
    date: str = "not recorded"

    @property
    def row(self) -> Row:
        return Row(self.case, self.seconds, self.result, self.failed)


class Results:
    """The lines of a file; a later one of a case takes the place of those before. OSError, naming
    the file, where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lines: dict[tuple[str, str, str], Line] = {}
        self._last: dict[str, str] = {}
        with files.naming(path):
            content = path.read_bytes() if path.exists() else b""
        whole = 0  # bytes that are usable
        for text in content.splitlines(keepends=True):
            line = _parsed(text)
            if line is None:
                break
            self._keep(line)
            whole += len(text)
        if whole < len(content):  # a line was cut off: nothing may follow in it
            files.write(path, content[:whole])

    def add(self, line: Line) -> None:
        """Append one measurement; what a full disk took of it is removed again."""
        text = (json.dumps(line.model_dump(), allow_nan=False) + "\n").encode()
        with files.naming(self.path), open(self.path, "ab", buffering=0) as out:
            size = out.seek(0, os.SEEK_END)
            try:
                left = memoryview(text)
                while left:
                    left = left[out.write(left) :]
            except OSError:
                out.truncate(size)
                raise
        self._keep(line)

    def row(self, of: str, experiment: str, case: Case) -> Row | None:
        """A case as it was measured."""
        line = self._lines.get((of, experiment, _key(case)))
        return None if line is None else line.row

    def last(self, recipe: str) -> str | None:
        """The digest of the recipe's latest measurement; None where there is none."""
        return self._last.get(recipe)

    def cases(self, of: str) -> list[tuple[str, Case]]:
        """What was measured: experiments and their cases."""
        return [(line.experiment, line.case) for line in self._lines.values() if line.of == of]

    def origin(self, of: str) -> str:
        """When and on what machine they were measured; "" where there are none."""
        lines = [line for line in self._lines.values() if line.of == of]
        dates = sorted({line.date for line in lines})
        machines = sorted({line.machine for line in lines})
        return f"{' to '.join(dates[:1] + dates[1:][-1:])}, {'; '.join(machines)}" if lines else ""

    def seconds(self, of: str, experiment: str | None = None) -> list[float]:
        """What its measurements took, those of one experiment or of all."""
        return [
            line.seconds
            for line in self._lines.values()
            if line.of == of and experiment in (None, line.experiment) and line.failed is None
        ]

    def _keep(self, line: Line) -> None:
        self._lines[line.of, line.experiment, _key(line.case)] = line
        self._last[line.recipe] = line.of


def _parsed(text: bytes) -> Line | None:
    """None for a line that is not whole."""
    if not text.endswith(b"\n"):
        return None
    try:
        return Line.model_validate(files.parse_json(text))
    except (ValueError, ValidationError):
        return None


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)
