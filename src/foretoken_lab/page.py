"""A report's files: one HTML page that loads nothing else, Markdown, JSON, and the pictures beside
them, SVG for the page, in the colour of its text, and PNG. Pictures need matplotlib.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from importlib import resources
from io import BytesIO, StringIO
from pathlib import Path
from typing import Any

from cycler import cycler
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure

from foretoken.lab import view
from foretoken.storage import files
from foretoken_lab.experiments.experiment import Plot, Section
from foretoken_lab.report import Chapter, PaperReport

RESULTS, PAGE, TEXT, DOCUMENT = "results.jsonl", "report.html", "report.md", "report.json"
FORMAT, VERSION = "foretoken.report", 1
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


def document(report: PaperReport) -> dict[str, Any]:
    """Values of JSON."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": report.date,
        "command": report.command,
        "quick": report.quick,
        "seconds": round(report.seconds, 1),
        "chapters": [_chapter_document(chapter) for chapter in report.chapters],
    }


def _chapter_document(chapter: Chapter) -> dict[str, Any]:
    recipe = chapter.recipe
    return {
        "name": chapter.name,
        "title": chapter.title,
        "recipe": None if recipe is None else recipe.model_dump(),
        "measured": [origin.model_dump(exclude={"recipe"}) for origin in chapter.origins],
        "headlines": [headline._asdict() for headline in chapter.headlines],
        "missing": chapter.missing,
        "failed": chapter.failed,
        "sections": [_section_document(section) for section in chapter.sections],
        "rows": {name: [asdict(row) for row in rows] for name, rows in chapter.found.items()},
    }


def _section_document(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "paragraphs": section.paragraphs,
        "tables": [asdict(table) for table in section.tables],
        "plots": [plot.name for plot in section.plots],
    }


def _line(text: str) -> str:
    """In one line, and no markup: a page that is shown from Markdown may take it for HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _rendered(template: str, report: PaperReport, *, autoescape: bool) -> str:
    environment = Environment(
        autoescape=autoescape, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    # of ours, and of a trace, which view.html escapes
    environment.filters |= {"line": _line, "cell": _cell, "svg": lambda plot: Markup(svg(plot))}
    text = resources.files("foretoken_lab").joinpath(template).read_text("utf-8")
    return environment.from_string(text).render(report=report, view=view)


def markdown(report: PaperReport) -> str:
    """The text; its pictures are PNG files."""
    return _rendered("page.md", report, autoescape=False).rstrip() + "\n"


def html(report: PaperReport) -> str:
    """The page."""
    return _rendered("page.html", report, autoescape=True)


def write(report: PaperReport, out: Path) -> list[Path]:
    """Write them to a folder, each whole or not at all; returns page, Markdown and JSON. OSError,
    naming the file, where one cannot be written."""
    (out / "plots").mkdir(parents=True, exist_ok=True)
    for chapter in report.chapters:
        for plot in (plot for section in chapter.sections for plot in section.plots):
            files.write(out / "plots" / f"{chapter.name}-{plot.name}.png", png(plot))
    contents = {
        PAGE: html(report),
        TEXT: markdown(report),
        DOCUMENT: json.dumps(document(report), allow_nan=False) + "\n",
    }
    for name, content in contents.items():
        files.write(out / name, content.encode())
    return [out / name for name in contents]
