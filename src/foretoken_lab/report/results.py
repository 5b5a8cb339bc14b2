"""The file of a report's measurements: a JSON line each, written as soon as it is done.

What is in it is not measured again. A kill or a full disk loses one measurement at most. Lines that
cannot be read stay as they are.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foretoken.storage import files
from foretoken_lab.experiments.experiment import Case, Row


class Origin(BaseModel):
    """What the measurements of a digest were made with; before the first of them, and again where
    it has changed. `recipe`: all of its fields; `cases`: how many it asks for."""

    model_config = ConfigDict(extra="forbid", strict=True)
    of: str
    recipe: dict[str, Any]
    cases: int
    machine: str
    date: str
    command: str


class Line(BaseModel):
    """One measurement. `of`: a digest of what it depends on: recipe, weights and machine."""

    model_config = ConfigDict(extra="forbid", strict=True)
    recipe: str
    of: str
    experiment: str
    case: Case
    seconds: float = Field(ge=0, allow_inf_nan=False)
    result: dict[str, Any] = {}
    failed: str | None = None

    @property
    def row(self) -> Row:
        return Row(self.case, self.seconds, self.result, self.failed)


class Results:
    """The lines of a file; a later one of a case takes the place of those before. OSError, naming
    the file, where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable: list[int] = []  # numbers of lines that are passed over
        self._lines: dict[tuple[str, str, str], Line] = {}
        self._origins: dict[str, list[Origin]] = {}
        self._last: dict[str, str] = {}
        with files.naming(path):
            content = path.read_bytes() if path.exists() else b""
        lines, _, self._torn = content.rpartition(b"\n")
        for number, text in enumerate(lines.split(b"\n"), 1):
            if text.strip() and not self._read(text):
                self.unreadable.append(number)
        self._gap = b""  # what comes before the next line
        if self._torn.strip() and self._read(self._torn):  # it lacks its end alone
            self._torn, self._gap = b"", b"\n"

    def add(self, line: Line | Origin) -> None:
        """Append one; what a full disk took of it is removed again, and so is a line before that
        was cut off."""
        text = self._gap + (json.dumps(line.model_dump(), allow_nan=False) + "\n").encode()
        with files.naming(self.path), open(self.path, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END) - len(self._torn)
            file.truncate(size)
            self._torn = b""
            try:
                rest = memoryview(text)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
        self._gap = b""
        self._keep(line)

    def row(self, origin: str, experiment: str, case: Case) -> Row | None:
        """A case as it was measured."""
        line = self._lines.get((origin, experiment, _key(case)))
        return None if line is None else line.row

    def last(self, recipe: str) -> str | None:
        """The digest of the recipe's latest measurement; None where there is none."""
        return self._last.get(recipe)

    def cases(self, origin: str) -> list[tuple[str, Case]]:
        """What was measured: experiments and their cases."""
        return [(line.experiment, line.case) for line in self._lines.values() if line.of == origin]

    def origins(self, origin: str) -> list[Origin]:
        """What its measurements were made with, the latest last."""
        return self._origins.get(origin, [])

    def seconds(self, origin: str, experiment: str | None = None) -> list[float]:
        """What its measurements took, those of one experiment or of all."""
        return [
            line.seconds
            for line in self._lines.values()
            if line.of == origin and experiment in (None, line.experiment) and line.failed is None
        ]

    def _read(self, text: bytes) -> bool:
        """Whether it is a line."""
        try:
            fields = files.parse_json(text)
            kind = Origin if isinstance(fields, dict) and "command" in fields else Line
            self._keep(kind.model_validate(fields))
        except (ValueError, ValidationError):
            return False
        return True

    def _keep(self, line: Line | Origin) -> None:
        if isinstance(line, Origin):
            self._origins.setdefault(line.of, []).append(line)
            return
        self._lines[line.of, line.experiment, _key(line.case)] = line
        self._last[line.recipe] = line.of


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)
