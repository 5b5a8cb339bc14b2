"""A benchmark as pictures (SVG): time per token against gamma, and where the time goes; tokens a
second against the number of texts at once.

Needs matplotlib (the extra `plot`).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from foretoken.lab.bench.figures import Figures, label
from foretoken.lab.bench.race import OWN, Key
from foretoken.lab.bench.throughput import Throughput
from foretoken.lab.estimate import Spread

PARTS = {"draft": "#4c9f70", "target": "#33658a", "verify": "#f6ae2d", "rest": "#bbbbbb"}


def draw(table: list[Figures], folder: Path, title: str) -> list[Path]:
    """Write both pictures; returns their paths."""
    kinds = (("time-per-token", _times), ("shares", _shares))
    return [_picture(folder / f"{name}.svg", title, partial(fill, table)) for name, fill in kinds]


def draw_batches(table: dict[int, list[Throughput]], folder: Path, title: str) -> Path:
    """Write the picture; returns its path."""
    return _picture(folder / "throughput.svg", title, partial(_rates, table))


def _picture(path: Path, title: str, fill: Callable[[Axes], None]) -> Path:
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    fill(axes)
    axes.set_title(title, fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, format="svg", metadata={"Date": None})
    return path


def _times(table: list[Figures], axes: Axes) -> None:
    """Medians with their quartiles; automatic gamma as a line across."""
    for i, name in enumerate(dict.fromkeys(one.name for one in table)):
        rows = [one for one in table if one.name == name and one.gamma is not None]
        times = [one.seconds_per_token for one in rows]
        middle = [time.median * 1e3 for time in times]
        low = [(time.median - time.q1) * 1e3 for time in times]
        high = [(time.q3 - time.median) * 1e3 for time in times]
        places = [float(one.gamma or 0) for one in rows]
        style = {"marker": "o", "capsize": 3, "color": f"C{i}"}
        axes.errorbar(places, middle, yerr=[low, high], label=name, **style)
    for one in table:
        if one.gamma is None:
            height = one.seconds_per_token.median * 1e3
            axes.axhline(height, color="C0", linestyle="--", label=f"{OWN}, automatic")
    axes.set_xticks(sorted({one.gamma for one in table if one.gamma is not None}))
    axes.set_xlabel("gamma, guesses per target call (0: plain decoding)")
    axes.set_ylabel("ms per token")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)


def _shares(table: list[Figures], axes: Axes) -> None:
    """A stacked bar for each gamma of this package: its height is the time per token."""
    rows = [one for one in table if one.shares]
    bottom = [0.0] * len(rows)
    for part, colour in PARTS.items():
        heights = [getattr(one.shares, part) * one.seconds_per_token.median * 1e3 for one in rows]
        names = [label(one.gamma) for one in rows]
        axes.bar(names, heights, bottom=bottom, color=colour, label=part)
        bottom = [a + b for a, b in zip(bottom, heights, strict=True)]
    axes.set_ylabel("ms per token")
    axes.legend(frameon=False)


def _rates(table: dict[int, list[Throughput]], axes: Axes) -> None:
    """A line for each contestant, medians with their quartiles."""
    lines: dict[Key, dict[int, Spread]] = {}
    for texts, rows in table.items():
        for row in rows:
            lines.setdefault((row.name, row.gamma), {})[texts] = row.tokens_per_second
    names = list(dict.fromkeys(name for name, _ in lines))
    for i, ((name, gamma), rates) in enumerate(lines.items()):
        low = [rate.median - rate.q1 for rate in rates.values()]
        high = [rate.q3 - rate.median for rate in rates.values()]
        style = {"marker": "o", "capsize": 3, "color": f"C{i}"}
        style["linestyle"] = ("-", "--", ":", "-.")[names.index(name) % 4]
        middle = [rate.median for rate in rates.values()]
        title = f"{name}, {label(gamma)}"
        axes.errorbar(list(rates), middle, yerr=[low, high], label=title, **style)
    axes.set_xticks(list(table))
    axes.set_xlabel("texts at once")
    axes.set_ylabel("tokens a second")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False)
