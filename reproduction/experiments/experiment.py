"""An experiment: cases to measure, each a row of JSON, and a section made of the rows.

Sections hold text, tables and pictures, as data; how they are shown is the report's business.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from foretoken.measurement.estimate import Estimate
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

T = TypeVar("T")
BLANK = "–"  # where a table has no figure
Case = dict[str, Any]  # what is asked, in JSON's values


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A case that was measured; `failed`: why it could not be."""

    case: Case
    seconds: float
    result: dict[str, Any] = field(default_factory=dict[str, Any])
    failed: str | None = None

    @property
    def draft(self) -> str:
        return self.case["draft"]

    @property
    def temperature(self) -> float:
        return self.case["temperature"]

    @property
    def told(self) -> str:
        """Draft and temperature, in words."""
        return f"{self.draft}, T={self.temperature:g}"


Found = Mapping[str, list[ResultRow]]  # of one recipe, by experiment


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of text; the first of a row names it. `emphasized`: rows that stand out."""

    caption: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    emphasized: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Plot:
    """A picture, drawn when it is wanted; inches."""

    name: str
    caption: str
    draw: Callable[[Figure], None]
    size: tuple[float, float] = (5.0, 3.3)


@dataclass(frozen=True, slots=True)
class Trace:
    """The coloured text of figure 1: an HTML fragment, escaped, and lines with marks."""

    caption: str
    html: str
    lines: list[str]


@dataclass(frozen=True, slots=True)
class Section:
    """A report's section on an experiment."""

    title: str
    paragraphs: list[str]
    tables: list[Table] = field(default_factory=list[Table])
    plots: list[Plot] = field(default_factory=list[Plot])
    traces: list[Trace] = field(default_factory=list[Trace])


def no_cases(recipe: Recipe) -> list[Case]:
    """Return none: rows of the other experiments are enough."""
    return []


def no_measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    raise AssertionError(case)


@dataclass(slots=True)
class Experiment:
    """`section` is made of rows alone; None where there is nothing to say. `cases`: none where the
    experiment does not apply. `measure`: one of them, as values of JSON; ForetokenError where it
    cannot be measured."""

    section: Callable[[Recipe, Found], Section | None]
    cases: Callable[[Recipe], list[Case]] = no_cases
    measure: Callable[[Pairs, Case], dict[str, Any]] = no_measure


def done(results: Found, name: str) -> list[ResultRow]:
    """The rows of an experiment that did not fail."""
    return [row for row in results.get(name, []) if row.failed is None]


def estimate(result: Mapping[str, Any]) -> Estimate:
    """Return the estimate that stands in a row."""
    return Estimate(**result)


def plus_minus(one: Estimate | None, digits: int = 3) -> str:
    """A value and half its 95 % interval; a dash where there is none."""
    return BLANK if one is None else f"{one.value:.{digits}f} ± {one.error:.{digits}f}"


def rounded(value: float | None, digits: int = 2) -> str:
    """A figure of a table; a dash where there is none."""
    return BLANK if value is None else f"{value:.{digits}f}"


def spanned(values: Sequence[float], digits: int = 2, *, sign: bool = False) -> str:
    """The smallest and the largest, once where both are shown alike."""
    low, high = (f"{end:{'+' if sign else ''}.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


Columns = Mapping[str, Callable[[T], str]]  # cells by heading
ABOUT: Columns[ResultRow] = {
    "draft": lambda row: row.draft,
    "T": lambda row: f"{row.temperature:g}",
}


def tabulated(
    caption: str,
    rows: Iterable[T],
    columns: Columns[T],
    emphasized: Callable[[T], bool] = lambda row: False,
) -> Table:
    """A table of these columns, less those that no row fills."""
    rows = list(rows)
    cells = {head: [cell(row) for row in rows] for head, cell in columns.items()}
    filled = {head: column for head, column in cells.items() if set(column) != {BLANK}}
    stars = tuple(i for i, row in enumerate(rows) if emphasized(row))
    return Table(caption, tuple(filled), list(zip(*filled.values(), strict=True)), stars)


class PlotLine(NamedTuple):
    """Estimates over x, and figures of another source beside them, in the same colour."""

    label: str
    points: list[tuple[float, Estimate]]
    others: list[tuple[float, float]]


def plotted(axes: Axes, lines: Iterable[PlotLine]) -> None:
    """Draw intervals, and the others as dashes."""
    for i, line in enumerate(lines):
        if line.points:
            x = [x for x, _ in line.points]
            y = [one.value for _, one in line.points]
            errors = [one.error for _, one in line.points]
            look: dict[str, Any] = {"color": f"C{i}", "label": line.label}
            axes.errorbar(x, y, errors, marker="o", ms=3, lw=1.2, capsize=2, **look)
        if line.others:
            axes.plot(*zip(*line.others, strict=True), "--", lw=1, color=f"C{i}")
    axes.spines[["top", "right"]].set_visible(False)


def named(case: Case) -> str:
    """A case in words."""
    return ", ".join(
        f"{'T' if key == 'temperature' else key} {_plain(value)}"
        for key, value in case.items()
        if value is not None
    )


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
