"""What pages say of the code is there: files, names with dots, and the folders that tables list."""

from __future__ import annotations

import re
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from scripts import ROOT

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
FOLDERS = ("src", "tests", "docs", "examples", "benchmarks")
FILES = [path.relative_to(ROOT) for name in FOLDERS for path in (ROOT / name).rglob("*.py")]
OTHERS = {"foretoken.service"}  # systemd's


def exists(dotted: str) -> bool:
    """Whether this is a module, or a name within one."""
    first, *rest = dotted.split(".")
    found: Any = import_module(first)
    for name in rest:
        if not hasattr(found, name) and hasattr(found, "__path__"):
            try:
                import_module(f"{found.__name__}.{name}")
            except ModuleNotFoundError:
                return False
        if not hasattr(found, name) and name not in getattr(found, "__annotations__", {}):
            return False
        found = getattr(found, name, None)
    return True


def dead(page: str) -> list[str]:
    """Return what a page names and nothing has: files of Python, and names from foretoken on. A
    word in capitals in a file's name stands for any."""
    files = [name for name in re.findall(r"[\w/-]+\.py\b", page) if not re.search("[A-Z]{4}", name)]
    names = {*re.findall(r"\bforetoken(?:_lab)?(?:\.[A-Za-z_]\w*)+", page)} - OTHERS
    lost = [name for name in files if not any(Path("/", f).match(name) for f in FILES)]
    return [*lost, *sorted(name for name in names if not exists(name))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_code_that_a_page_names_exists(page: Path) -> None:
    assert dead(page.read_text(encoding="utf-8")) == []


def test_a_name_that_is_gone_is_found() -> None:
    page = (
        "`foretoken.load` in step.py; `foretoken.Engine.add`, `foretoken.lost.name`; lost/step.py"
    )
    assert dead(page) == ["lost/step.py", "foretoken.lost.name"]


@pytest.mark.parametrize("page", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_the_table_of_folders_has_each(page: str) -> None:
    cells = re.findall(r"^\| (.*?) \|", (ROOT / page).read_text(encoding="utf-8"), re.M)
    told = {name for cell in cells for name in re.findall(r"`(\w+)/`", cell)}
    folders = {path.parent.name for path in (ROOT / "src/foretoken").glob("*/__init__.py")}
    assert len(folders) > 10 and folders - told == set()
