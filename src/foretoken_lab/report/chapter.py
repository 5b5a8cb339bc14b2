"""What a report says: a chapter for each recipe, of sections made of rows, and one for the
paper's arithmetic. Knows no page, and no files but by name."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from foretoken_lab.experiments import acceptance, walltime
from foretoken_lab.experiments.experiment import (
    Found,
    Row,
    Section,
    named,
    plus_minus,
)
from foretoken_lab.recipes.recipe import Recipe, shown_from
from foretoken_lab.report import arithmetic
from foretoken_lab.report.results import Origin, Results
from foretoken_lab.report.run import EXPERIMENTS, Job

ARITHMETIC = "The paper's arithmetic"


class Headline(NamedTuple):
    """A figure that a chapter begins with, and its words."""

    figure: str
    words: str


@dataclass(frozen=True, slots=True)
class Chapter:
    """Of one recipe; None: of the paper's formulas, which need no models."""

    name: str
    title: str
    sections: list[Section]
    recipe: Recipe | None = None
    headlines: list[Headline] = field(default_factory=list[Headline])
    found: Found = field(default_factory=dict[str, list[Row]])
    failed: list[str] = field(default_factory=list[str])
    missing: int = 0  # cases that are not measured yet
    origins: list[Origin] = field(default_factory=list[Origin])  # of its rows, the latest last

    @property
    def measured(self) -> str:
        """When its rows were measured, on what machine and by what command."""
        if not self.origins:
            return "nothing yet"
        dates = sorted({origin.date for origin in self.origins})
        date = dates[0] if len(dates) == 1 else f"{dates[0]} to {dates[-1]}"
        return f"{date}, {self.origins[-1].machine}"


@dataclass(frozen=True, slots=True)
class Report:
    """All that is shown. `quick`: whether its figures are the quick ones."""

    chapters: list[Chapter]
    date: str
    command: str
    quick: bool
    seconds: float  # that its measurements took


def report(jobs: list[Job], results: Results, *, date: str, command: str, quick: bool) -> Report:
    """Made of the rows that there are; `jobs`: all cases, recipe by recipe."""
    recipes = {job.of: job.recipe for job in jobs}
    chapters = [
        _chapter(
            recipe, [job for job in jobs if job.of == origin], results, results.origins(origin)
        )
        for origin, recipe in recipes.items()
    ]
    chapters.append(Chapter("paper", ARITHMETIC, [arithmetic.section()]))
    seconds = sum(sum(results.seconds(origin)) for origin in recipes)
    return Report(chapters, date, command, quick, seconds)


def _chapter(recipe: Recipe, jobs: list[Job], results: Results, origins: list[Origin]) -> Chapter:
    """`origins`: of its digest; they know how many cases there are where `jobs` has rows alone."""
    rows_of: dict[str, list[Row]] = {}
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
    command = shown_from(recipe, Path.cwd())
    return Chapter(
        recipe.name, recipe.title, sections, command, lines, rows_of, failed, missing, origins
    )


def _headlines(recipe: Recipe, results: Found) -> list[Headline]:
    """At each temperature the fastest draft and the one that agrees most."""
    best = walltime.fastest(results).values()
    lines: list[Headline] = []
    for temperature in recipe.temperatures:
        at = f"T={temperature:g}"
        timed = [row for row in best if row.case["temperature"] == temperature]
        if timed:
            row = max(timed, key=lambda row: walltime.speed(row).value)
            speed = plus_minus(walltime.speed(row), 2)
            lines.append(
                Headline(f"{speed}x", f"{at}: {row.case['draft']}, gamma {row.case['gamma']}")
            )
        alphas = [
            (own, draft.label)
            for draft in recipe.drafts
            if (own := acceptance.known(results, draft.label, temperature)) is not None
        ]
        if alphas:
            own, label = max(alphas, key=lambda pair: pair[0].value)
            lines.append(Headline(plus_minus(own), f"{at}: alpha of {label}"))
    return lines
