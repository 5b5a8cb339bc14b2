"""The pages of reproduction/: their commands run, and what they name and link to is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import commands, dead, run, skipped, stand_ins
from scripts import ROOT, hook

HOME = ROOT / "reproduction"
PAGES = [HOME / "README.md", HOME / "recipes/README.md", *sorted((HOME / "docs").glob("*.md"))]
SKIPPED = {  # a pattern, and why what it matches is not run here
    r"^make ": "it makes .venv, and its recipes are these commands, the tests and the site",
    r"^python -m reproduction report": "half an hour: test_report.py has a recipe of a tiny pair",
    r"^python -m reproduction.standins": "hours, and texts that are no part of the repository",
    r"NOVELS": "the text is no part of the repository",
    r"-2026-": "minutes: of thousands of requests",
    r"\$PROMPTS|fleet_check": "a machine for itself",
}
EVERY = {page.name: commands(page.read_text()) for page in PAGES}


@pytest.mark.prove
@pytest.mark.parametrize(
    "name", [n for n, each in EVERY.items() if not all(skipped(e, SKIPPED) for e in each)]
)
def test_every_page_runs_as_it_stands(
    name: str, tmp_path_factory: pytest.TempPathFactory, tmp_path: Path
) -> None:
    given = stand_ins(tmp_path_factory.mktemp("given"))
    run([each for each in EVERY[name] if not skipped(each, SKIPPED)], given, tmp_path)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert dead(text) == [] and dead(text, "reproduction") == []
    assert len(text.splitlines()) <= 300


REPORTS = sorted((HOME / "results").rglob("*.md"))


@pytest.mark.parametrize("page", [*PAGES, *REPORTS], ids=lambda page: page.stem)
def test_links_lead_to_files(page: Path) -> None:
    links = re.findall(r"\]\((?![a-z]+:|#)([^)#\s]+)", page.read_text(encoding="utf-8"))
    assert [link for link in links if not (page.parent / link).exists()] == []


def test_every_formula_can_be_drawn() -> None:
    formulas = [
        block.split("```")[0]
        for page in PAGES
        for block in page.read_text(encoding="utf-8").split("```math\n")[1:]
    ]
    assert formulas
    for formula in formulas:
        assert "merror" not in hook("formulas").formula(formula, "math", "formula")
