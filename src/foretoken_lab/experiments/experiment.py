"""The protocol of experiments: cases to measure, each a row of JSON, and a section made of the
rows.

Sections hold text, tables and pictures, as data; how they are shown is the report's business.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

from foretoken.lab.estimate import Estimate
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BLANK = "–"  # where a table has no figure
Case = dict[str, Any]  # what is asked, in JSON's values


@dataclass(frozen=True, slots=True)
class ResultRow:
    """A case that was measured; `failed`: why it could not be."""

    case: Case
    seconds: float
    result: dict[str, Any] = field(default_factory=dict[str, Any])
    failed: str | None = None


Found = Mapping[str, list[ResultRow]]  # of one recipe, by experiment


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of text; the first of a row names it. `emphasized`: rows that stand out."""

    caption: str
    head: tuple[str, ...]
    rows: list[tuple[str, ...]]
    emphasized: frozenset[int] = frozenset()


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


class Experiment(Protocol):
    """A module of this folder."""

    def cases(self, recipe: Recipe) -> list[Case]:
        """Return the cases to measure; none where the experiment does not apply."""
        ...

    def measure(self, pairs: Pairs, case: Case) -> dict[str, Any]:
        """One case, as values of JSON. ForetokenError where it cannot be measured."""
        ...

    def section(self, recipe: Recipe, results: Found) -> Section | None:
        """Made of rows alone; None where there is nothing to say."""
        ...


def done(results: Found, name: str) -> list[ResultRow]:
    """The rows of an experiment that did not fail."""
    return [row for row in results.get(name, []) if row.failed is None]


def estimate(result: Mapping[str, Any]) -> Estimate:
    """Return the estimate that stands in a row."""
    return Estimate(**result)


def plus_minus(one: Estimate, digits: int = 3) -> str:
    """A value and half its 95 % interval."""
    return f"{one.value:.{digits}f} ± {one.error:.{digits}f}"


def rounded(value: float | None, digits: int = 2) -> str:
    """A figure of a table; a dash where there is none."""
    return BLANK if value is None else f"{value:.{digits}f}"


def spanned(values: Sequence[float], digits: int = 2, *, sign: bool = False) -> str:
    """The smallest and the largest, once where both are shown alike."""
    low, high = (f"{end:{'+' if sign else ''}.{digits}f}" for end in (min(values), max(values)))
    return low if low == high else f"{low} to {high}"


def without_blanks(table: Table) -> Table:
    """The table less the columns that no row fills."""
    columns = [i for i in range(len(table.head)) if any(row[i] != BLANK for row in table.rows)]
    rows = [tuple(row[i] for i in columns) for row in table.rows]
    return replace(table, head=tuple(table.head[i] for i in columns), rows=rows)


def told(row: ResultRow) -> str:
    """Draft and temperature, in words."""
    return f"{row.case['draft']}, T={row.case['temperature']:g}"


def named(case: Case) -> str:
    """A case in words."""
    return ", ".join(
        f"{'T' if key == 'temperature' else key} {_plain(value)}"
        for key, value in case.items()
        if value is not None
    )


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)
