"""A report as Markdown, its pictures as files beside it."""

from __future__ import annotations

from collections.abc import Iterator

from foretoken_lab.experiments.experiment import Section, Table
from foretoken_lab.report.chapter import Chapter, Report


def markdown(report: Report, pictures: dict[tuple[str, str], str]) -> str:
    """The text; `pictures`: their paths from it, by chapter and name."""
    return "\n".join(_lines(report, pictures)) + "\n"


def _lines(report: Report, pictures: dict[tuple[str, str], str]) -> Iterator[str]:
    yield "# The paper's experiments, measured here"
    yield ""
    yield f"Written on {report.date}."
    yield ""
    if report.quick:
        yield "The quick report: few tokens, texts and repeats, so that intervals are wide."
        yield ""
    yield f"    {report.command}"
    for chapter in report.chapters:
        yield from _chapter(chapter, pictures)


def _chapter(chapter: Chapter, pictures: dict[tuple[str, str], str]) -> Iterator[str]:
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
        yield from _section(chapter.name, section, pictures)


def _section(chapter: str, section: Section, pictures: dict[tuple[str, str], str]) -> Iterator[str]:
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
