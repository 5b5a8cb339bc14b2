"""The report's files: one page that loads nothing, Markdown with pictures, and JSON."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO

import pytest
from PIL import Image

from reproduction import page as plots
from reproduction.experiments.experiment import ResultRow, Trace
from reproduction.page import write
from reproduction.recipe import Prompts
from reproduction.report import PaperReport, report
from reproduction.results import Job, ResultFile, ResultLine, ResultOrigin, digest
from reproduction.tests.laboratory import MACHINE, found, recipe

EVIL = "<script>alert(1)</script>"


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> PaperReport:
    """Of rows as if measured: one failed, one is missing, and texts are hostile."""
    folder = tmp_path_factory.mktemp("report")
    (folder / "prompts.txt").write_text("a\nb\n")
    own = recipe(prompts=Prompts(file=str(folder / "prompts.txt")))
    of, results = digest(own, MACHINE), ResultFile(folder / "results.jsonl")
    html = '<ol class="trace"><li><strong class="corrected">&lt;b&gt;</strong></li></ol>'
    traced = {"prompt": EVIL, "html": html, "lines": ["   1 [<b>]"], "tokens": 4, "calls": 2}
    rows = found() | {
        "trace": [ResultRow({"draft": "small", "temperature": 1.0, "gamma": 5}, 1.0, traced)],
        "lenience": [ResultRow({"draft": "small", "temperature": 0.0}, 1.0, failed=f"no {EVIL}")],
    }
    asked: list[Job] = []
    origin = {"of": of, "recipe": own.model_dump(), "cases": 4, "machine": str(MACHINE)}
    results.add(ResultOrigin(**origin, date="2026-11-22", command="foretoken report <then>"))
    for name, own_rows in rows.items():
        for row in own_rows:
            asked.append(Job(own, of, name, row.case))
            line = {"recipe": own.name, "of": of, "experiment": name, "case": row.case}
            results.add(
                ResultLine(**line, seconds=row.seconds, result=row.result, failed=row.failed)
            )
    asked.append(Job(own, of, "timeline", {"draft": "small"}))
    header = {"date": "2026-11-23", "command": "foretoken report tables.toml --out report"}
    return report(asked, results, quick=True, **header)


@pytest.fixture(scope="module")
def folder(made, tmp_path_factory):
    out = tmp_path_factory.mktemp("written")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(plots, "DPI", 20)  # the same, sooner
        write(made, out)
    return out


class Reading(HTMLParser):
    """What a page loads, where it links to, and whether its tags close."""

    EMPTY = ("meta", "br", "link", "img")

    def __init__(self) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.links: list[str] = []
        self.ids: list[str] = []
        self.open: list[str] = []
        self.tags: list[str] = []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        if tag not in self.EMPTY:
            self.open.append(tag)
        for name, value in attrs:
            if name in ("href", "xlink:href"):
                self.links.append(value)
            source = name in ("src", "srcset", "data") and not value.startswith("data:")
            if source or (tag == "link" and name == "href"):
                self.loads.append(value)
            if name == "id":
                self.ids.append(value)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        if tag not in self.EMPTY:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def test_the_page_is_whole_and_loads_nothing(folder):
    text = (folder / "report.html").read_text()
    page = Reading()
    page.feed(text)
    assert page.open == [] and page.loads == [] and "script" not in page.tags
    assert not re.findall(r"@import|url\((?!#)", text)
    outside = [link for link in page.links if not link.startswith("#")]
    assert outside == ["https://arxiv.org/abs/2211.17192"]  # followed by a reader, not loaded
    assert len(set(page.ids)) == len(page.ids)
    assert {link[1:] for link in page.links if link.startswith("#")} <= set(page.ids)
    assert page.tags.count("svg") == len(list((folder / "plots").glob("*.png"))) >= 5
    assert "currentColor" in text and plots.INK not in text  # light on a dark page


def test_the_page_says_what_it_is_made_of(folder):
    text = (folder / "report.html").read_text()
    for part in (
        "Measured: 2026-11-22, a processor, 2 cores",
        "report &lt;then&gt;",
        "The quick report",
        "2026-11-23",
        "tables.toml",
    ):
        assert part in text
    assert "1 measurement failed" in text and "1 is not done yet" in text
    assert "Tables &lt;of&gt; laws" in text
    assert "<li><b>1.90 ± 0.01x</b><span>T=0: small, gamma 2</span></li>" in text
    assert EVIL not in text and text.count("no &lt;script&gt;") == 1


def test_markdown_has_all_tables_and_its_pictures(folder, made):
    text = "".join(path.read_text() for path in sorted(folder.glob("report*.md")))
    tables = sum(len(s.tables) for chapter in made.chapters for s in chapter.sections)
    assert len(re.findall(r"^\|( --- \|)+$", text, re.MULTILINE)) == tables >= 6
    pictures = re.findall(r"!\[[^]]*]\(([^)]+)\)", text)
    assert pictures and all((folder / name).read_bytes()[1:4] == b"PNG" for name in pictures)
    assert "<script" not in text and "- lenience, draft small, T 0: no &lt;script>" in text
    assert "**1.90 ± 0.01**" in text  # the fastest
    assert "(report-paper.md)" in (folder / "report.md").read_text()
    headlines = re.findall(r"^- \*\*(.+)\*\* (.+)$", text, re.MULTILINE)
    assert headlines == [
        ("1.90 ± 0.01x", "T=0: small, gamma 2"),
        ("0.800 ± 0.010", "T=0: alpha of large"),
        ("1.80 ± 0.01x", "T=1: small, gamma 2"),
        ("0.750 ± 0.010", "T=1: alpha of large"),
    ]


def test_plots_have_a_palette(made):
    plot = made.chapters[0].sections[0].plots[0]
    drawn = Image.open(BytesIO(plots.png(plot)))
    assert drawn.mode == "P" and len(drawn.getcolors() or []) <= plots.PALETTE
    assert drawn.size == tuple(round(side * plots.DPI) for side in plot.size)


def test_json_has_rows_and_sections(folder):
    document = json.loads((folder / "report.json").read_text())
    own, paper = document["chapters"]
    assert document["quick"] is True and paper["rows"] == {}
    (origin,) = own["measured"]
    assert origin["date"] == "2026-11-22" and origin["machine"] == str(MACHINE)
    assert len(own["rows"]["acceptance"]) == 6 and own["missing"] == 1
    assert own["headlines"][0] == ["1.90 ± 0.01x", "T=0: small, gamma 2"]
    assert own["sections"][0]["tables"] and paper["sections"][0]["tables"]


def test_a_trace_is_in_both(made, folder):
    traces = [trace for chapter in made.chapters for s in chapter.sections for trace in s.traces]
    (one,) = traces
    assert isinstance(one, Trace) and one.html in (folder / "report.html").read_text()
    assert "       1 [<b>]" in (folder / f"report-{made.chapters[0].name}.md").read_text()


def test_a_file_that_cannot_be_written_is_named(made, tmp_path):
    (tmp_path / "report.html").mkdir()
    with pytest.raises(OSError, match="report.html cannot be written"):
        write(replace(made, chapters=[]), tmp_path)
