"""The arithmetic of the paper, which needs no model: table 1, figures 2 to 4, and what its other
tables must be by section 3."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from foretoken import theory
from reproduction.experiments import paper
from reproduction.experiments.experiment import Columns, Plot, Section, tabulated
from reproduction.theory import ORACLE_BOUND, operations_factor

if TYPE_CHECKING:
    from matplotlib.figure import Figure

ALPHAS = np.linspace(0, 0.99, 100).round(2).tolist()
GAMMAS = (1, 2, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1)
MAX_GAMMA = 200  # the optimum is 120 at alpha .99, c .01
HALF = 0.005  # what rounding may have moved a printed alpha or c


@dataclass(frozen=True, slots=True)
class Curves:
    """One picture: a line over `ALPHAS` for every value of `label`."""

    name: str
    axis: str
    label: str
    values: tuple[float, ...]
    function: Callable[..., float]

    @property
    def lines(self) -> dict[str, list[float]]:
        return {
            f"{self.label} {value}": [self.function(alpha, value) for alpha in ALPHAS]
            for value in self.values
        }


def figures() -> list[Curves]:
    """Figure 2: tokens per run of the target (equation 1). 3: the optimal gamma, by c. 4: speed and
    operations at c = 0 and c_hat = 0."""
    speed = partial(theory.walltime_factor, c=0.0)
    operations = partial(operations_factor, c_hat=0.0)
    best = partial(theory.optimal_gamma, max_gamma=MAX_GAMMA)
    return [
        Curves("figure-2", "tokens per run", "gamma", GAMMAS, theory.expected_tokens),
        Curves("figure-3", "optimal gamma", "c", COSTS, best),
        Curves("figure-4-speed", "times faster", "gamma", GAMMAS, speed),
        Curves("figure-4-operations", "times the operations", "gamma", GAMMAS, operations),
    ]


def section() -> Section:
    """All of it."""
    of_1 = {line: _agrees_with_1(line) for line in paper.TABLE_1}
    of_4 = {line: _agrees_with_4(line) for line in paper.TABLE_2}
    first: Columns[paper.Balance] = {
        "alpha": lambda line: f"{line.alpha:g}",
        "gamma": lambda line: str(line.gamma),
        "operations": lambda line: f"{_operations(line):.2f}",
        "paper's operations": lambda line: f"{line.operations:.2f}",
        "speed": lambda line: f"{_speed(line):.2f}",
        "paper's speed": lambda line: f"{line.speed:.2f}",
        "same": lambda line: of_1[line],
    }
    fourth: Columns[paper.PrintedSpeed] = {
        "line": lambda line: f"{line.task}, {line.draft}, T={line.temperature}",
        "alpha": lambda line: f"{line.alpha:g}",
        "gamma": lambda line: str(line.gamma),
        "c": lambda line: f"{line.c:g}",
        "Theorem 3.8": lambda line: f"{_expected(line):.2f}",
        "paper": lambda line: f"{line.expected:.1f}",
        "same": lambda line: of_4[line],
    }
    said = [*of_4.values()]
    return Section(
        "Table 1, figures 2 to 4: the arithmetic",
        [
            f"{[*of_1.values()].count('yes')} of the {len(of_1)} lines of table 1 come out as "
            "printed, operations and speed both.",
            f"{said.count('yes')} of table 4's {len(said)} expected factors follow as printed, "
            f"{said.count('but for rounding')} only from alpha and c before they were rounded, "
            f"{said.count('no')} not at all.",
            _said_of_the_rest(),
            "Figures 2 to 4 are drawn from equation 1 and Theorems 3.8 and 3.11 for every alpha. "
            "The paper prints no numbers in them; its table 1 is points of figure 4.",
        ],
        [
            tabulated("Table 1: c = c_hat = 0 (Theorems 3.8 and 3.11)", of_1, first),
            tabulated("Table 4: its expected factors from its alpha, gamma and c", of_4, fourth),
        ],
        [Plot(one.name, _caption(one), partial(_draw, one)) for one in figures()],
    )


def _operations(line: paper.Balance) -> float:
    return operations_factor(line.alpha, line.gamma, 0)


def _speed(line: paper.Balance) -> float:
    return theory.walltime_factor(line.alpha, line.gamma, 0)


def _expected(line: paper.PrintedSpeed, moved: float = 0) -> float:
    """Theorem 3.8, with alpha and c moved apart."""
    return theory.walltime_factor(line.alpha + moved, line.gamma, line.c - moved)


def _agrees_with_1(line: paper.Balance) -> str:
    same = _rounds(_operations(line), line.operations, 2) and _rounds(_speed(line), line.speed, 2)
    return "yes" if same else "no"


def _agrees_with_4(line: paper.PrintedSpeed) -> str:
    if _rounds(_expected(line), line.expected, 1):
        return "yes"
    within = _expected(line, -HALF) - 0.05 <= line.expected <= _expected(line, HALF) + 0.05
    return "but for rounding" if within else "no"


def _rounds(value: float, printed: float, digits: int) -> bool:
    """Tell whether a figure is printed as the value rounds."""
    return math.isclose(round(value, digits), printed, abs_tol=1e-9)


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
        f"{printed}). An oracle for gamma is at most {ORACLE_BOUND - 1:.0%} above the best "
        "fixed gamma (the paper: about 60 %)."
    )


def _caption(curves: Curves) -> str:
    return f"Figure {curves.name.split('-')[1]}: {curves.axis} over alpha"


def _draw(curves: Curves, figure: Figure) -> None:
    axes = figure.add_subplot()
    for label, line in curves.lines.items():
        axes.plot(ALPHAS, line, label=label)
    axes.set_xlabel("alpha")
    axes.set_ylabel(curves.axis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
