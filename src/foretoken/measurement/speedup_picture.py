"""A benchmark as a picture (SVG): speed-up by gamma, measured and predicted. Needs matplotlib."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.figure import Figure


def draw(document: dict[str, Any], path: Path) -> None:
    """Draw what `foretoken bench --json` prints: lines for each library, and for each number of
    texts at once."""
    figure = Figure(figsize=(7, 4.2), layout="constrained")
    axes = figure.add_subplot()
    for part in document.get("batches", [document]):
        texts = f", {part['batch']} at once" if part["batch"] else ""
        for name in dict.fromkeys(row["name"] for row in part["figures"]):
            rows = [row for row in part["figures"] if row["name"] == name]
            _lines(axes, name + texts, rows)
    axes.set_xlabel("gamma, draft tokens per step (0: plain decoding)")
    axes.set_ylabel("speed-up over foretoken's plain decoding")
    axes.set_title(f"{document['target']}, {document['draft']}", fontsize=9)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    with rc_context({"svg.hashsalt": "foretoken"}):  # else two pictures of the same differ
        figure.savefig(path, format="svg", metadata={"Date": None})


def _lines(axes: Axes, name: str, rows: list[dict[str, Any]]) -> None:
    """Draw a contestant in one colour; automatic gamma is a line across."""
    fixed = [row for row in rows if row["gamma"] is not None]
    speedups = [row["speedup"] for row in fixed]
    (line,) = axes.plot([row["gamma"] for row in fixed], speedups, marker="o", label=name)
    colour = line.get_color()
    if known := [row for row in fixed if row["predicted"]]:
        gammas = [row["gamma"] for row in known]
        predicted = [row["predicted"]["predicted"] for row in known]
        axes.plot(gammas, predicted, "x:", label=f"{name}, predicted", color=colour)
    for row in rows:
        if row["gamma"] is None:
            label = f"{name}, automatic"
            axes.axhline(row["speedup"], linestyle="--", label=label, color=colour)
