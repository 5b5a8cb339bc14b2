"""Figures 2 to 4 of the paper: the factors of section 3 over alpha, as numbers and pictures (SVG).

Needs matplotlib (the extra `plot`). Knows no models and no clocks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.theory import expected_tokens, operations_factor, optimal_gamma, walltime_factor

ALPHAS = np.linspace(0, 0.99, 100).round(2).tolist()
GAMMAS = (1, 2, 3, 5, 7, 10)
COSTS = (0.01, 0.02, 0.05, 0.1)
MAX_GAMMA = 200  # the optimum is 120 at alpha .99, c .01


@dataclass(frozen=True, slots=True)
class Curves:
    """One picture: a line over `ALPHAS` for every label."""

    name: str
    axis: str
    lines: dict[str, list[float]]


def _over_alpha(
    name: str, axis: str, label: str, values: tuple[float, ...], function: Callable[..., float]
) -> Curves:
    lines = {f"{label} {value}": [function(alpha, value) for alpha in ALPHAS] for value in values}
    return Curves(name, axis, lines)


def figure_2() -> Curves:
    """Tokens per run of the target (equation 1), for several gamma."""
    return _over_alpha("figure-2", "tokens per run", "gamma", GAMMAS, expected_tokens)


def figure_3() -> Curves:
    """The optimal gamma, for several c."""

    def best(alpha: float, c: float) -> float:
        return optimal_gamma(alpha, c, max_gamma=MAX_GAMMA)

    return _over_alpha("figure-3", "optimal gamma", "c", COSTS, best)


def figure_4() -> tuple[Curves, Curves]:
    """Speed and operations at c = 0 and c_hat = 0, for several gamma."""

    def speed(alpha: float, gamma: int) -> float:
        return walltime_factor(alpha, gamma, c=0.0)

    def operations(alpha: float, gamma: int) -> float:
        return operations_factor(alpha, gamma, c_hat=0.0)

    return (
        _over_alpha("figure-4-speed", "times faster", "gamma", GAMMAS, speed),
        _over_alpha("figure-4-operations", "times the operations", "gamma", GAMMAS, operations),
    )


def lines(figure: Figure, curves: Curves) -> Axes:
    """Draw the lines of a picture in a figure."""
    axes = figure.add_subplot()
    for label, line in curves.lines.items():
        axes.plot(ALPHAS, line, label=label)
    axes.set_xlabel("alpha")
    axes.set_ylabel(curves.axis)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    return axes


def draw(folder: Path, alpha: float) -> list[Path]:
    """Write the four pictures, with a line at that alpha; returns their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths: list[Path] = []
    for curves in (figure_2(), figure_3(), *figure_4()):
        figure = Figure(figsize=(6, 4), layout="constrained")
        lines(figure, curves).axvline(alpha, color="grey", linestyle="--", linewidth=1)
        paths.append(folder / f"{curves.name}.svg")
        figure.savefig(paths[-1], format="svg", metadata={"Date": None})
    return paths
