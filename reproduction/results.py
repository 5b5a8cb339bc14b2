"""Measures what recipes ask for, case by case, and keeps the results.

The file of results has a JSON line for each measurement, written as soon as it is done; what is in
it is not measured again. A kill or a full disk loses one measurement at most. Lines that cannot be
read, such as one that was cut off, stay as they are.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from datetime import date
from pathlib import Path
from statistics import fmean
from time import perf_counter
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foretoken.errors import ForetokenError, InputError, to_one_line
from foretoken.measurement.machine import Machine
from foretoken.storage import files
from reproduction.experiments import (
    acceptance,
    beyond,
    lenience,
    observations,
    pixels,
    quality,
    trace,
    walltime,
)
from reproduction.experiments.experiment import Case, Experiment, ResultRow, named
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe, shown_from

EXPERIMENTS: dict[str, Experiment] = {  # in the order of the page
    "acceptance": acceptance.EXPERIMENT,
    "walltime": walltime.EXPERIMENT,
    "bigram": walltime.BIGRAM,
    "lenience": lenience.EXPERIMENT,
    "trace": trace.TRACE,
    "timeline": trace.TIMELINE,
    "quality": quality.EXPERIMENT,
    "beyond": beyond.EXPERIMENT,
    "drafts": observations.DRAFTS,
    "observations": observations.OBSERVATIONS,
    "pixels": pixels.EXPERIMENT,
}


class ResultOrigin(BaseModel):
    """The conditions that the measurements of a digest were made with; written before the first of
    them, and again where they have changed. `recipe`: all of its fields; `cases`: how many it asks
    for."""

    model_config = ConfigDict(extra="forbid", strict=True)
    of: str
    recipe: dict[str, Any]
    cases: int
    machine: str
    date: str
    command: str


class ResultLine(BaseModel):
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
    def row(self) -> ResultRow:
        return ResultRow(self.case, self.seconds, self.result, self.failed)


class ResultFile:
    """The lines of a file; a later one of a case takes the place of those before. OSError, naming
    the file, where it cannot be read or written."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.unreadable: list[int] = []  # numbers of lines that are passed over
        self._lines: dict[tuple[str, str, str], ResultLine] = {}
        self._origins: dict[str, list[ResultOrigin]] = {}
        self._last: dict[str, str] = {}
        with files.name_path_in_errors(path):
            content = path.read_bytes() if path.exists() else b""
        for number, text in enumerate(content.split(b"\n"), 1):
            if text.strip() and not self._read(text):
                self.unreadable.append(number)
        self._gap = b"\n" if content and not content.endswith(b"\n") else b""  # before the next

    def add(self, line: ResultLine | ResultOrigin) -> None:
        """Append one; what a full disk took of it is removed again."""
        text = self._gap + (json.dumps(line.model_dump(), allow_nan=False) + "\n").encode()
        with files.name_path_in_errors(self.path), open(self.path, "ab", buffering=0) as file:
            size = file.seek(0, os.SEEK_END)
            try:
                rest = memoryview(text)
                while rest:
                    rest = rest[file.write(rest) :]
            except OSError:
                file.truncate(size)
                raise
        self._gap = b""
        self._keep(line)

    def row(self, origin: str, experiment: str, case: Case) -> ResultRow | None:
        """A case as it was measured."""
        line = self._lines.get((origin, experiment, _key(case)))
        return None if line is None else line.row

    def last(self, recipe: str) -> str | None:
        """The digest of the recipe's latest measurement; None where there is none."""
        return self._last.get(recipe)

    def cases(self, origin: str) -> list[tuple[str, Case]]:
        """Return the experiments and cases that were measured."""
        return [(line.experiment, line.case) for line in self._lines.values() if line.of == origin]

    def seconds(self, origin: str, experiment: str | None = None) -> list[float]:
        """Return what its measurements took, of one experiment or of all."""
        return [
            line.seconds
            for line in self._lines.values()
            if line.of == origin and experiment in (None, line.experiment) and line.failed is None
        ]

    def origins(self, origin: str) -> list[ResultOrigin]:
        """Return the conditions that its measurements were made with, the latest last."""
        return self._origins.get(origin, [])

    def _read(self, text: bytes) -> bool:
        """Read a line; tell whether it is one."""
        try:
            fields = files.parse_json(text)
            kind = ResultOrigin if isinstance(fields, dict) and "command" in fields else ResultLine
            self._keep(kind.model_validate(fields))
        except (ValueError, ValidationError):
            return False
        return True

    def _keep(self, line: ResultLine | ResultOrigin) -> None:
        if isinstance(line, ResultOrigin):
            self._origins.setdefault(line.of, []).append(line)
            return
        self._lines[line.of, line.experiment, _key(line.case)] = line
        self._last[line.recipe] = line.of


def _key(case: Case) -> str:
    return json.dumps(case, sort_keys=True)


class Job(NamedTuple):
    """A case of a recipe's experiment. `of`: as in results."""

    recipe: Recipe
    of: str
    experiment: str
    case: Case


def jobs(recipes: list[Recipe], machine: Machine) -> list[Job]:
    """All cases: recipe by recipe, and in each draft by draft, so that a pair is loaded once.
    InputError for prompts that cannot be read."""
    jobs_asked: list[Job] = []
    for recipe in recipes:
        origin = digest(recipe, machine)
        own = [
            Job(recipe, origin, name, case)
            for name, experiment in EXPERIMENTS.items()
            if name in recipe.experiments
            for case in experiment.cases(recipe)
        ]
        jobs_asked += _by_draft(own)
    return jobs_asked


def digest(recipe: Recipe, machine: Machine) -> str:
    """Return a digest of all that measurements depend on: they are used again where it is equal."""
    facts = [recipe.digest, asdict(machine)]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]


def as_measured(recipes: list[Recipe], results: ResultFile) -> list[Job]:
    """The cases of each recipe's latest measurements, wherever they were made, with the recipe as
    it was then: needs neither models nor prompts. InputError for a recipe that has none."""
    measured: list[Job] = []
    for recipe in recipes:
        origin = results.last(recipe.name)
        if origin is None or not results.origins(origin):
            raise InputError(
                f"{results.path} has no measurement of {recipe.name}; leave --as-measured out"
            )
        fields = results.origins(origin)[-1].recipe | {"title": recipe.title}
        try:
            then = Recipe.model_validate(fields)
            measured += _by_draft([Job(then, origin, *case) for case in results.cases(origin)])
        except (KeyError, ValueError):  # of another version, or written by hand
            raise InputError(
                f"{results.path} has {recipe.name} as another version measured it, which cannot be "
                "shown here; leave --as-measured out"
            ) from None
    return measured


def _by_draft(own: list[Job]) -> list[Job]:
    """A recipe's cases in the order of its drafts."""
    labels = [draft.label for job in own[:1] for draft in job.recipe.drafts]
    return sorted(own, key=lambda job: labels.index(job.case["draft"]))


def run(
    jobs_asked: list[Job], results: ResultFile, machine: Machine, command: str
) -> Iterator[tuple[int, str, float | None]]:
    """Measure the cases that have no result, those that failed before included; says before each
    how many are done, which it is, and the seconds left, None where nothing tells. A case that
    fails is a result, with its reason, and the others go on."""
    rows = [results.row(job.of, job.experiment, job.case) for job in jobs_asked]
    missing = [job for job, row in zip(jobs_asked, rows, strict=True) if row is None or row.failed]
    pairs: Pairs | None = None
    for i, job in enumerate(missing):
        label = f"{job.recipe.name}: {job.experiment}, {named(job.case)}"
        yield len(jobs_asked) - len(missing) + i, label, _seconds_left(missing[i:], results)
        if pairs is None or pairs.recipe is not job.recipe:
            pairs = None  # one recipe's models at a time
            pairs = Pairs(job.recipe)
            _begin(results, job, sum(one.of == job.of for one in jobs_asked), machine, command)
        results.add(_measured(pairs, job))


def _seconds_left(missing: list[Job], results: ResultFile) -> float | None:
    """Estimate by the mean of the experiment's measurements, or else of all of the recipe's."""
    total = 0.0
    for job in missing:
        measured = results.seconds(job.of, job.experiment) or results.seconds(job.of)
        if not measured:
            return None
        total += fmean(measured)
    return total


def _begin(results: ResultFile, job: Job, cases: int, machine: Machine, command: str) -> None:
    """Write down what the recipe's measurements are made with, unless the file says so."""
    origin = ResultOrigin(
        of=job.of,
        recipe=shown_from(job.recipe, Path.cwd()).model_dump(),
        cases=cases,
        machine=str(machine),
        date=date.today().isoformat(),
        command=command,
    )
    if origin not in results.origins(job.of)[-1:]:
        results.add(origin)


def _measured(pairs: Pairs, job: Job) -> ResultLine:
    start = perf_counter()
    result: dict[str, Any] = {}
    failed = None
    try:
        result = EXPERIMENTS[job.experiment].measure(pairs, job.case)
        json.dumps(result, allow_nan=False)
    except ForetokenError as error:
        failed = to_one_line(error)
    except Exception as error:  # of whatever kind: the others go on
        failed = f"{type(error).__name__}: {to_one_line(error)}"
    return ResultLine(
        recipe=job.recipe.name,
        of=job.of,
        experiment=job.experiment,
        case=job.case,
        seconds=round(perf_counter() - start, 3),
        result={} if failed else result,
        failed=failed,
    )
