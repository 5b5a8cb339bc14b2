"""The contents of a report: a chapter for each recipe, of sections made of rows, and one for what
follows from the paper's formulas alone: table 1, figures 2 to 4, and what its other tables must be
by section 3. Knows no page, and no files but by name.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from foretoken import theory
from foretoken_lab import curves
from foretoken_lab.curves import Curves
from foretoken_lab.experiments import acceptance, paper, walltime
from foretoken_lab.experiments.experiment import (
    Found,
    Plot,
    ResultRow,
    Section,
    Table,
    named,
    plus_minus,
)
from foretoken_lab.recipes.recipe import Recipe, shown_from
from foretoken_lab.report.run import EXPERIMENTS, Job, ResultFile, ResultOrigin

if TYPE_CHECKING:
    from matplotlib.figure import Figure


HALF = 0.005  # what rounding may have moved a printed alpha or c
FIGURES = (
    "Figures 2 to 4 are drawn from equation 1 and Theorems 3.8 and 3.11 for every alpha. The paper "
    "prints no numbers in them; its table 1 is points of figure 4."
)


def section() -> Section:
    """All of it: no model is needed."""
    table_1, table_4 = _table_1(), _table_4()
    pictures = (curves.figure_2(), curves.figure_3(), *curves.figure_4())
    return Section(
        "Table 1, figures 2 to 4: the arithmetic",
        [_said_of_1(table_1), _said_of_4(table_4), _said_of_the_rest(), FIGURES],
        [table_1, table_4],
        [Plot(one.name, _caption(one), partial(_draw, one)) for one in pictures],
    )


def _table_1() -> Table:
    lines: list[tuple[str, ...]] = []
    for line in paper.TABLE_1:
        operations = theory.operations_factor(line.alpha, line.gamma, 0)
        speed = theory.walltime_factor(line.alpha, line.gamma, 0)
        lines.append(
            (
                f"{line.alpha:g}",
                str(line.gamma),
                f"{operations:.2f}",
                f"{line.operations:.2f}",
                f"{speed:.2f}",
                f"{line.speed:.2f}",
                _yes(_rounds(operations, line.operations, 2) and _rounds(speed, line.speed, 2)),
            )
        )
    head = ("alpha", "gamma", "operations", "paper", "speed", "paper", "same")
    return Table("Table 1: c = c_hat = 0 (Theorems 3.8 and 3.11)", head, lines)


def _table_4() -> Table:
    lines: list[tuple[str, ...]] = []
    for line in paper.TABLE_2:
        value = theory.walltime_factor(line.alpha, line.gamma, line.c)
        low = theory.walltime_factor(line.alpha - HALF, line.gamma, line.c + HALF)
        high = theory.walltime_factor(line.alpha + HALF, line.gamma, line.c - HALF)
        within = low - 0.05 <= line.expected <= high + 0.05
        exact = _rounds(value, line.expected, 1)
        lines.append(
            (
                f"{line.task}, {line.draft}, T={line.temperature}",
                f"{line.alpha:g}",
                str(line.gamma),
                f"{line.c:g}",
                f"{value:.2f}",
                f"{line.expected:.1f}",
                "yes" if exact else "but for rounding" if within else "no",
            )
        )
    head = ("line", "alpha", "gamma", "c", "Theorem 3.8", "paper", "same")
    return Table("Table 4: its expected factors from its own alpha, gamma and c", head, lines)


def _said_of_1(table: Table) -> str:
    same = sum(row[-1] == "yes" for row in table.rows)
    return (
        f"{same} of the {len(table.rows)} lines of table 1 come out as printed, operations and "
        "speed both."
    )


def _said_of_4(table: Table) -> str:
    answers = [row[-1] for row in table.rows]
    claim = f"Of table 4's {len(answers)} expected factors {answers.count('yes')} follow as printed"
    if rounding := answers.count("but for rounding"):
        claim += f", {rounding} only from alpha and c before they were rounded"
    return claim + f", {answers.count('no')} not at all."


def _said_of_the_rest() -> str:
    bigram = theory.walltime_factor(paper.BIGRAM_ALPHA, paper.BIGRAM_GAMMA, 0)
    greedy = ", ".join(
        f"{theory.walltime_factor(alpha, paper.GREEDY_LENIENT_GAMMA, paper.LENIENT_C):.2f}"
        for alpha in paper.GREEDY_LENIENT_ALPHAS
    )
    printed = ", ".join(f"{speed:g}" for speed in paper.GREEDY_LENIENT_SPEEDS)
    return (
        f"A bigram of alpha {paper.BIGRAM_ALPHA:g} with gamma {paper.BIGRAM_GAMMA} gains "
        f"{bigram:.2f}x (printed {paper.BIGRAM_SPEED:g}x); greedy lenience {greedy} (printed "
        f"{printed}). An oracle for gamma is at most {theory.ORACLE_BOUND - 1:.0%} above the best "
        "fixed gamma (the paper: about 60 %)."
    )


def _rounds(value: float, printed: float, digits: int) -> bool:
    """Tell whether a figure is printed as the value rounds."""
    return math.isclose(round(value, digits), printed, abs_tol=1e-9)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _caption(one: Curves) -> str:
    number = one.name.split("-")[1]
    return f"Figure {number}: {one.axis} over alpha"


def _draw(one: Curves, figure: Figure) -> None:
    curves.lines(figure, one)


ARITHMETIC = "The paper's arithmetic"


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
    origins: list[ResultOrigin] = field(
        default_factory=list[ResultOrigin]
    )  # of its rows, the latest last

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
    chapters.append(Chapter("paper", ARITHMETIC, [section()]))
    seconds = sum(sum(results.seconds(origin)) for origin in recipes)
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
