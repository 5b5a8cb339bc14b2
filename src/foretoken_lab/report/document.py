"""A report as JSON: its sections as on the page, and the rows that they are made of."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from foretoken_lab.experiments.experiment import Section
from foretoken_lab.report.chapter import Chapter, Report

FORMAT, VERSION = "foretoken.report", 1


def document(report: Report) -> dict[str, Any]:
    """Values of JSON."""
    return {
        "format": FORMAT,
        "version": VERSION,
        "date": report.date,
        "command": report.command,
        "quick": report.quick,
        "seconds": round(report.seconds, 1),
        "chapters": [_chapter(chapter) for chapter in report.chapters],
    }


def _chapter(chapter: Chapter) -> dict[str, Any]:
    recipe = chapter.recipe
    return {
        "name": chapter.name,
        "title": chapter.title,
        "recipe": None if recipe is None else recipe.model_dump(),
        "measured": [origin.model_dump(exclude={"recipe"}) for origin in chapter.origins],
        "headlines": [headline._asdict() for headline in chapter.headlines],
        "missing": chapter.missing,
        "failed": chapter.failed,
        "sections": [_section(section) for section in chapter.sections],
        "rows": {name: [asdict(row) for row in rows] for name, rows in chapter.found.items()},
    }


def _section(section: Section) -> dict[str, Any]:
    return {
        "title": section.title,
        "paragraphs": section.paragraphs,
        "tables": [
            {"caption": table.caption, "head": list(table.head), "rows": [*map(list, table.rows)]}
            for table in section.tables
        ],
        "plots": [plot.name for plot in section.plots],
    }
