"""The contents of a report: a chapter for each recipe, of sections made of rows, and one for what
follows from the paper's formulas alone. Knows no page, and no files but by name.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from foretoken_lab.experiments import acceptance, arithmetic, walltime
from foretoken_lab.experiments.experiment import Found, ResultRow, Section, named, plus_minus
from foretoken_lab.recipe import Recipe, shown_from
from foretoken_lab.results import EXPERIMENTS, Job, ResultFile, ResultOrigin


class Headline(NamedTuple):
    """A figure that a chapter begins with, and its words."""

    figure: str
    words: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """A report's chapter on one recipe; None: on the paper's formulas, which need no models."""

    name: str
    title: str
    sections: list[Section]
    recipe: Recipe | None = None
    headlines: list[Headline] = field(default_factory=list[Headline])
    found: Found = field(default_factory=dict[str, list[ResultRow]])
    failed: list[str] = field(default_factory=list[str])
    missing: int = 0  # cases that are not measured yet
    # of its rows, the latest last
    origins: list[ResultOrigin] = field(default_factory=list[ResultOrigin])

    @property
    def measured(self) -> str:
        """When its rows were measured, on what machine and by what command."""
        if not self.origins:
            return "nothing yet"
        dates = sorted({origin.date for origin in self.origins})
        date = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        return f"{date}, {self.origins[-1].machine}"


@dataclass(frozen=True, slots=True)
class PaperReport:
    """All that is shown. `quick`: whether its figures are the quick ones."""

    chapters: list[Chapter]
    date: str
    command: str
    quick: bool
    seconds: float  # that its measurements took


def report(
    jobs: list[Job], results: ResultFile, *, date: str, command: str, quick: bool
) -> PaperReport:
    """Made of the rows that there are; `jobs`: all cases, recipe by recipe."""
    recipes = {job.of: job.recipe for job in jobs}
    chapters = [
        _chapter(
            recipe, [job for job in jobs if job.of == origin], results, results.origins(origin)
        )
        for origin, recipe in recipes.items()
    ]
    chapters.append(Chapter("paper", "The paper's arithmetic", [arithmetic.section()]))
    seconds = sum(map(results.seconds, recipes))
    return PaperReport(chapters, date, command, quick, seconds)


def _chapter(
    recipe: Recipe, jobs: list[Job], results: ResultFile, origins: list[ResultOrigin]
) -> Chapter:
    """`origins`: of its digest; they know how many cases there are where `jobs` has rows alone."""
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
    lines: list[Headline] = []
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


def _headlines(recipe: Recipe, results: Found) -> list[Headline]:
    """At each temperature the fastest draft and the one that agrees most."""
    lines: list[Headline] = []
    for temperature in recipe.temperatures:
        best = [row for row in walltime.fastest(results).values() if row.temperature == temperature]
        if best:
            row = max(best, key=lambda row: walltime.speed(row).value)
            words = f"T={temperature:g}: {row.draft}, gamma {row.case['gamma']}"
            lines.append(Headline(f"{plus_minus(walltime.speed(row), 2)}x", words))
        labels = [draft.label for draft in recipe.drafts]
        known = {label: acceptance.known(results, label, temperature) for label in labels}
        alphas = {label: alpha for label, alpha in known.items() if alpha is not None}
        if alphas:
            label = max(alphas, key=lambda label: alphas[label].value)
            words = f"T={temperature:g}: alpha of {label}"
            lines.append(Headline(plus_minus(alphas[label]), words))
    return lines
