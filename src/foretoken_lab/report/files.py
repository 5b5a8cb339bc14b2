"""A report's files: one HTML page that loads nothing else, Markdown, JSON, and the pictures beside
them, SVG for the page, in the colour of its text, and PNG. Pictures need matplotlib.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import asdict
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
from foretoken_lab.experiments.experiment import Plot, Section, Table, Trace
from foretoken_lab.report.chapter import Chapter, PaperReport

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


FORMAT, VERSION = "foretoken.report", 1


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
        "tables": [
            {"caption": table.caption, "head": list(table.head), "rows": [*map(list, table.rows)]}
            for table in section.tables
        ],
        "plots": [plot.name for plot in section.plots],
    }


def markdown(report: PaperReport, pictures: dict[tuple[str, str], str]) -> str:
    """The text; `pictures`: their paths from it, by chapter and name."""
    return "\n".join(_lines(report, pictures)) + "\n"


def _lines(report: PaperReport, pictures: dict[tuple[str, str], str]) -> Iterator[str]:
    yield "# The paper's experiments, measured here"
    yield ""
    yield f"Written on {report.date}."
    yield ""
    if report.quick:
        yield "The quick report: few tokens, texts and repeats, so that intervals are wide."
        yield ""
    yield f"    {report.command}"
    for chapter in report.chapters:
        yield from _chapter_lines(chapter, pictures)


def _chapter_lines(chapter: Chapter, pictures: dict[tuple[str, str], str]) -> Iterator[str]:
    yield f"\n## {_inline(chapter.title)}\n"
    if chapter.recipe is not None:
        drafts = _inline(", ".join(draft.label for draft in chapter.recipe.drafts))
        target = _inline(chapter.recipe.target or "the pair that ships")
        yield f"Target: {target}. Drafts: {drafts}."
        yield f"Measured: {_inline(chapter.measured)}."
        yield ""
        yield from (f"    {origin.command}\n" for origin in chapter.origins[-1:])
    for headline in chapter.headlines:
        yield f"- **{headline.figure}** {_inline(headline.words)}"
    if chapter.missing:
        yield f"\n{chapter.missing} cases are not measured yet."
    if chapter.failed:
        yield "\nFailed:\n"
        yield from (f"- {_inline(line)}" for line in chapter.failed)
    for section in chapter.sections:
        yield from _section_lines(chapter.name, section, pictures)


def _section_lines(
    chapter: str, section: Section, pictures: dict[tuple[str, str], str]
) -> Iterator[str]:
    yield f"\n### {_inline(section.title)}\n"
    for paragraph in section.paragraphs:
        yield f"{_inline(paragraph)}\n"
    for table in section.tables:
        yield from _table(table)
    for trace in section.traces:
        yield f"{_inline(trace.caption)}\n"
        yield from (f"    {line}" for line in trace.lines)
        yield ""
    for plot in section.plots:
        yield f"![{_inline(plot.caption)}]({pictures[chapter, plot.name]})\n"


def _table(table: Table) -> Iterator[str]:
    yield f"{_inline(table.caption)}:\n"
    yield _row(table.head)
    yield _row(("---",) * len(table.head))
    for i, row in enumerate(table.rows):
        yield _row(tuple(f"**{_cell(c)}**" for c in row) if i in table.emphasized else row)
    yield ""


def _row(cells: tuple[str, ...]) -> str:
    return f"| {' | '.join(_cell(cell) for cell in cells)} |"


def _cell(text: str) -> str:
    return _inline(text).replace("|", "\\|")


def _inline(text: str) -> str:
    """In one line, and no markup: a page that is shown from Markdown may take it for HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


TEMPLATE = Path(__file__).with_name("page.html")


def html(report: PaperReport) -> str:
    """The page."""
    environment = Environment(
        autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.from_string(TEMPLATE.read_text("utf-8")).render(
        report=report,
        picture=_picture,
        coloured=_coloured,
        legend=Markup(view.html_legend()),
        style=Markup(view.STYLE),
        minutes=f"{report.seconds / 60:.0f}" if report.seconds >= 90 else "1",
        failures=sum(len(chapter.failed) for chapter in report.chapters),
        missing=sum(chapter.missing for chapter in report.chapters),
    )


def _picture(plot: Plot) -> Markup:
    return Markup(svg(plot))  # ours, no text of a model in it that is not escaped


def _coloured(trace: Trace) -> Markup:
    return Markup(trace.html)  # escaped by view.html


RESULTS, PAGE, TEXT, DOCUMENT = "results.jsonl", "report.html", "report.md", "report.json"
PICTURES = "plots"


def write(report: PaperReport, out: Path) -> list[Path]:
    """Write them to a folder, each whole or not at all; returns page, Markdown and JSON. OSError,
    naming the file, where one cannot be written."""
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    pictures: dict[tuple[str, str], str] = {}
    for chapter in report.chapters:
        for plot in (plot for section in chapter.sections for plot in section.plots):
            path = f"{PICTURES}/{chapter.name}-{plot.name}.png"
            files.write(out / path, png(plot))
            pictures[chapter.name, plot.name] = path
    contents = {
        PAGE: html(report),
        TEXT: markdown(report, pictures),
        DOCUMENT: json.dumps(document(report), allow_nan=False) + "\n",
    }
    for name, content in contents.items():
        files.write(out / name, content.encode())
    return [out / name for name in contents]
