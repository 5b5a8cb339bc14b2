"""What follows from the paper's formulas alone: table 1, figures 2 to 4, and what its other tables
must be by section 3. Computed, and compared with what is printed."""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING

from foretoken import theory
from foretoken_lab import curves
from foretoken_lab.curves import Curves
from foretoken_lab.experiments import paper
from foretoken_lab.experiments.experiment import Plot, Section, Table

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
    """Whether a figure is printed as the value rounds."""
    return math.isclose(round(value, digits), printed, abs_tol=1e-9)


def _yes(holds: bool) -> str:
    return "yes" if holds else "no"


def _caption(one: Curves) -> str:
    number = one.name.split("-")[1]
    return f"Figure {number}: {one.axis} over alpha"


def _draw(one: Curves, figure: Figure) -> None:
    curves.lines(figure, one)
