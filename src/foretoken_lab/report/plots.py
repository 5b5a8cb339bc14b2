"""Pictures of a report: SVG for a page, in the colour of its text and thus for light and dark, and
PNG beside it. Needs matplotlib."""

from __future__ import annotations

import re
from io import BytesIO, StringIO
from typing import Any

from cycler import cycler
from matplotlib import rc_context
from matplotlib.figure import Figure

from foretoken_lab.experiments.experiment import Plot

INK = "#010203"  # stands for the colour of the page's text
COLOURS = ("#3d7fc4", "#d9661f", "#2f9e6e", "#8a63c9", "#c9940a", "#7a7d85")  # on white and black
DPI = 160
METADATA = re.compile(r"<metadata>.*?</metadata>", re.DOTALL)
ID = re.compile(r' id="([^"]+)"')


def svg(plot: Plot) -> str:
    """An `<svg>` element; its ids differ from those of other plots' pictures."""
    file = StringIO()
    with rc_context(_style(INK) | {"svg.fonttype": "none", "svg.hashsalt": plot.name}):
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        _figure(plot).savefig(file, format="svg", transparent=True, metadata=nothing)
    text = METADATA.sub("", file.getvalue()).replace(INK, "currentColor")
    text = text[text.index("<svg") :]
    return ID.sub(lambda found: found[0] if f"#{found[1]}" in text else "", text)


def png(plot: Plot) -> bytes:
    """The same on white."""
    file = BytesIO()
    with rc_context(_style("#1b1b1d")):
        _figure(plot).savefig(file, format="png", dpi=DPI, metadata={"Software": None})
    return file.getvalue()


def _figure(plot: Plot) -> Figure:
    figure = Figure(figsize=plot.size, layout="constrained")
    plot.draw(figure)
    return figure


def _style(ink: str) -> Any:
    inked = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")
    return dict.fromkeys(inked, ink) | {
        "axes.prop_cycle": cycler(color=COLOURS),
        "font.size": 9.5,
        "axes.titlesize": 9.5,
        "lines.linewidth": 1.5,
        "errorbar.capsize": 2,
    }
