"""A report's files: one HTML page that loads nothing else, the same as Markdown and JSON, and its
pictures, SVG in the page and PNG beside it, which need matplotlib.
"""

from __future__ import annotations

import json
import re
from dataclasses import asdict, replace
from importlib import resources
from io import BytesIO
from pathlib import Path
from typing import Any

from cycler import cycler
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup
from matplotlib import rc_context
from matplotlib.figure import Figure
from PIL import Image

from foretoken.storage import files
from reproduction import view
from reproduction.experiments.experiment import Plot
from reproduction.report import PaperReport

RESULTS, PAGE, TEXT, DOCUMENT = "results.jsonl", "report.html", "report.md", "report.json"
COLOURS = ("#3d7fc4", "#d9661f", "#2f9e6e", "#8a63c9", "#c9940a", "#7a7d85")
DPI = 160
PALETTE = 64  # colours of a PNG
STYLE: Any = {
    "axes.prop_cycle": cycler(color=COLOURS),
    "font.size": 9.5,
    "axes.titlesize": 9.5,
    "lines.linewidth": 1.5,
    "errorbar.capsize": 2,
}
INK = "#010203"  # stands for the colour of the page's text
INKED = ("text.color", "axes.edgecolor", "axes.labelcolor", "xtick.color", "ytick.color")


def png(plot: Plot) -> bytes:
    """A picture on white, in few colours: a quarter of the bytes."""
    drawn = _drawn(plot, STYLE, format="png", dpi=DPI, metadata={"Software": None})
    file = BytesIO()
    Image.open(BytesIO(drawn)).convert("RGB").quantize(PALETTE).save(file, "PNG", optimize=True)
    return file.getvalue()


def svg(plot: Plot) -> Markup:
    """The same in the colour of the text around it; its ids are those of no other picture."""
    style = STYLE | dict.fromkeys(INKED, INK) | {"svg.fonttype": "none", "svg.hashsalt": plot.name}
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    text = _drawn(plot, style, format="svg", transparent=True, metadata=nothing).decode()
    text = re.sub(r"<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r' id="([^"]+)"', lambda id: id[0] if f"#{id[1]}" in text else "", text)
    return Markup(text.replace(INK, "currentColor"))


def _drawn(plot: Plot, style: Any, **how: Any) -> bytes:
    file = BytesIO()
    with rc_context(style):
        figure = Figure(figsize=plot.size, layout="constrained")
        plot.draw(figure)
        figure.savefig(file, **how)
    return file.getvalue()


def _line(text: str) -> str:
    """In one line, and no markup: a page that is shown from Markdown may take it for HTML."""
    return " ".join(text.split()).replace("<", "&lt;")


def _cell(text: str) -> str:
    return _line(text).replace("|", "\\|")


def _rendered(template: str, **known: Any) -> str:
    environment = Environment(
        autoescape=template.endswith("html"),
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {"line": _line, "cell": _cell, "svg": svg}
    text = resources.files("reproduction").joinpath(template).read_text("utf-8")
    return environment.from_string(text).render(known).rstrip() + "\n"


def document(report: PaperReport) -> dict[str, Any]:
    """Values of JSON: tables and paragraphs as shown, and the rows that they are made of."""
    chapters = [
        {
            "name": chapter.name,
            "title": chapter.title,
            "measured": [origin.model_dump(exclude={"recipe"}) for origin in chapter.origins],
            "headlines": chapter.headlines,
            "missing": chapter.missing,
            "failed": chapter.failed,
            "sections": [
                {
                    "title": section.title,
                    "paragraphs": section.paragraphs,
                    "tables": [asdict(table) for table in section.tables],
                    "plots": [plot.name for plot in section.plots],
                }
                for section in chapter.sections
            ],
            "rows": {name: [asdict(row) for row in rows] for name, rows in chapter.rows.items()},
        }
        for chapter in report.chapters
    ]
    return asdict(replace(report, chapters=[])) | {"chapters": chapters}


def write(report: PaperReport, out: Path) -> list[Path]:
    """Write them to a folder, each whole or not at all; returns page, Markdown, which links to a
    file for each chapter, and JSON. OSError, naming the file, where one cannot be written."""
    (out / "plots").mkdir(parents=True, exist_ok=True)
    for chapter in report.chapters:
        for plot in (plot for section in chapter.sections for plot in section.plots):
            files.write_atomically(out / "plots" / f"{chapter.name}-{plot.name}.png", png(plot))
        text = _rendered("chapter.md", chapter=chapter)
        files.write_atomically(out / f"report-{chapter.name}.md", text.encode())
    style = Markup(view.STYLE)
    files.write_atomically(
        out / PAGE, _rendered("page.html", report=report, view=view, style=style).encode()
    )
    files.write_atomically(out / TEXT, _rendered("page.md", report=report).encode())
    content = json.dumps(document(report), allow_nan=False) + "\n"
    files.write_atomically(out / DOCUMENT, content.encode())
    return [out / PAGE, out / TEXT, out / DOCUMENT]
