"""The contents of a report: a chapter for each recipe, of sections made of rows, and one for what
follows from the paper's formulas alone. Knows no page, and no files but by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from reproduction.experiments import arithmetic, walltime
from reproduction.experiments.experiment import (
    Found,
    ResultRow,
    Section,
    done,
    estimate,
    named,
    plus_minus,
)
from reproduction.recipe import Recipe, shown_from
from reproduction.results import EXPERIMENTS, Job, ResultFile, ResultOrigin


@dataclass(frozen=True, slots=True)
class Chapter:
    """A report's chapter on one recipe; None: on the paper's formulas, which need no models."""

    name: str
    title: str
    sections: list[Section]
    recipe: Recipe | None = None
    headlines: list[tuple[str, str]] = field(default_factory=list[tuple[str, str]])
    rows: dict[str, list[ResultRow]] = field(default_factory=dict[str, list[ResultRow]])
    failed: list[str] = field(default_factory=list[str])
    missing: int = 0  # cases that are not measured yet
    # of its rows, the latest last
    origins: list[ResultOrigin] = field(default_factory=list[ResultOrigin])

    @property
    def measured(self) -> str:
        """When its rows were measured, on what machine and by what command."""
        if not self.origins:
            return "nothing yet"
        dates = [origin.date for origin in self.origins]
        span = " to ".join(sorted({min(dates), max(dates)}))
        return f"{span}, {self.origins[-1].machine}"


@dataclass(frozen=True, slots=True)
class PaperReport:
    """All that is shown. `quick`: whether its figures are the quick ones."""

    chapters: list[Chapter]
    date: str
    command: str
    quick: bool


def report(
    jobs: list[Job], results: ResultFile, *, date: str, command: str, quick: bool
) -> PaperReport:
    """Made of the rows that there are; `jobs`: all cases, recipe by recipe."""
    recipes = {job.of: job.recipe for job in jobs}
    chapters = [
        _chapter(recipe, [job for job in jobs if job.of == origin], results)
        for origin, recipe in recipes.items()
    ]
    chapters.append(Chapter("paper", "The paper's arithmetic", [arithmetic.section()]))
    return PaperReport(chapters, date, command, quick)


def _chapter(recipe: Recipe, jobs: list[Job], results: ResultFile) -> Chapter:
    """`jobs`: may be those that were measured alone; their origins know how many there are."""
    origins = results.origins(jobs[0].of) if jobs else []
    rows_of: dict[str, list[ResultRow]] = {}
    failed: list[str] = []
    missing = max([0, *(origin.cases - len(jobs) for origin in origins[-1:])])
    for job in jobs:
        row = results.row(job.of, job.experiment, job.case)
        if row is None:
            missing += 1
            continue
        rows_of.setdefault(job.experiment, []).append(row)
        if row.failed is not None:
            failed.append(f"{job.experiment}, {named(job.case)}: {row.failed}")
    sections: list[Section] = []
    lines: list[tuple[str, str]] = []
    try:
        for name in (name for name in EXPERIMENTS if name in recipe.experiments):
            section = EXPERIMENTS[name].section(recipe, rows_of)
            sections += [section] if section is not None else []
        lines = _headlines(recipe, rows_of)
    except (ArithmeticError, LookupError, TypeError, ValueError) as error:  # of another version
        failed.append(f"its measurements cannot be shown ({type(error).__name__}: {error})")
    shown = shown_from(recipe, Path.cwd())
    return Chapter(
        recipe.name, recipe.title, sections, shown, lines, rows_of, failed, missing, origins
    )


def _headlines(recipe: Recipe, results: Found) -> list[tuple[str, str]]:
    """Figures and their names: at each temperature the fastest draft and the highest alpha."""
    lines: list[tuple[str, str]] = []
    for at in recipe.temperatures:
        timed = [row for row in walltime.fastest(results).values() if row.temperature == at]
        agreed = [row for row in done(results, "acceptance") if row.temperature == at]
        if timed:
            row = max(timed, key=lambda row: walltime.speed(row).value)
            name = f"T={at:g}: {row.draft}, gamma {row.case['gamma']}"
            lines.append((f"{plus_minus(walltime.speed(row), 2)}x", name))
        if agreed:
            row = max(agreed, key=lambda row: estimate(row.result["alpha"]).value)
            own = estimate(row.result["alpha"])
            lines.append((plus_minus(own), f"T={at:g}: alpha of {row.draft}"))
    return lines
