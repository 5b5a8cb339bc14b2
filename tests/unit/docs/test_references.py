"""What pages say of the code is there: files, names with dots, and the folders that tables list."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pages import dead
from scripts import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_that_a_page_names_exists(page: Path) -> None:
    assert dead(page.read_text(encoding="utf-8")) == []


def test_the_table_of_folders_has_each() -> None:
    page = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    cells = re.findall(r"^\| (.*?) \|", page, re.M)
    told = {name for cell in cells for name in re.findall(r"`(\w+)/`", cell)}
    folders = {path.parent.name for path in (ROOT / "src/foretoken").glob("*/__init__.py")}
    assert len(folders) > 10 and folders - told == set()
