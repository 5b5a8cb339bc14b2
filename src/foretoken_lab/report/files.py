"""A report's files: the page, Markdown, JSON, and the pictures beside them."""

from __future__ import annotations

import json
from pathlib import Path

from foretoken.storage import files
from foretoken_lab.report import plots
from foretoken_lab.report.chapter import Report
from foretoken_lab.report.document import document
from foretoken_lab.report.markdown import markdown
from foretoken_lab.report.page import html

RESULTS, PAGE, TEXT, DOCUMENT = "results.jsonl", "report.html", "report.md", "report.json"
PICTURES = "plots"


def write(report: Report, out: Path) -> list[Path]:
    """Write them to a folder, each whole or not at all; returns page, Markdown and JSON. OSError,
    naming the file, where one cannot be written."""
    (out / PICTURES).mkdir(parents=True, exist_ok=True)
    pictures: dict[tuple[str, str], str] = {}
    for chapter in report.chapters:
        for plot in (plot for section in chapter.sections for plot in section.plots):
            path = f"{PICTURES}/{chapter.name}-{plot.name}.png"
            files.write(out / path, plots.png(plot))
            pictures[chapter.name, plot.name] = path
    contents = {
        PAGE: html(report),
        TEXT: markdown(report, pictures),
        DOCUMENT: json.dumps(document(report), allow_nan=False) + "\n",
    }
    for name, content in contents.items():
        files.write(out / name, content.encode())
    return [out / name for name in contents]
