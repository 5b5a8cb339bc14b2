"""paper_map.md: every item has code and tests, and all that is named exists."""

from __future__ import annotations

import ast
import re
from functools import lru_cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE, TESTS = ROOT / "src" / "foretoken", ROOT / "tests"
LINES = (ROOT / "reproduction/docs/paper_map.md").read_text().splitlines()
ROWS = [line.strip("|").split("|") for line in LINES if line.startswith("| C")]
ITEMS = [row[0].strip() for row in ROWS]


@lru_cache
def names(path: Path) -> set[str]:
    """Functions, classes and methods of a file; of these also `Class.method`."""
    found: set[str] = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            parts = [part for part in node.body if isinstance(part, ast.FunctionDef)]
            found |= {f"{node.name}.{part.name}" for part in parts}
    return found


def quoted(cell: str) -> list[str]:
    return re.findall(r"`([^`]+)`", cell)


def is_code(name: str) -> bool:
    """`module.function`, `module.Class.method`, a module, or a file."""
    if "/" in name:
        return (ROOT / name).is_file()
    parts = name.split(".")
    for cut in range(len(parts), 0, -1):
        within = ROOT if parts[0] == "reproduction" else SOURCE
        path = within.joinpath(*parts[:cut]).with_suffix(".py")
        if path.is_file():
            return cut == len(parts) or ".".join(parts[cut:]) in names(path)
    return False


def is_test(name: str) -> bool:
    file, _, function = name.partition("::")
    path = (ROOT if file.startswith("reproduction/") else TESTS) / file
    return path.is_file() and function.startswith("test_") and function in names(path)


def test_no_item_is_left_out() -> None:
    assert ITEMS == [f"C{i}" for i in range(1, 59)]


@pytest.mark.parametrize("row", ROWS, ids=ITEMS)
def test_an_item_names_what_exists(row: list[str]) -> None:
    assert len(row) == 5 and all(cell.strip() for cell in row)
    code, tests = quoted(row[3]), quoted(row[4])
    assert code and tests
    assert [name for name in code if not is_code(name)] == []
    assert [name for name in tests if not is_test(name)] == []


def test_what_does_not_exist_is_seen() -> None:
    assert (
        is_code("theory.beta")
        and is_code("reproduction.train.train_lm")
        and is_code("engine.batch.Batch.step")
    )
    assert not is_code("theory.gamma_ray") and not is_code("engine.batch.Batch.walk")
    assert not is_code("nowhere") and not is_code("benchmarks/nothing.py")
    assert is_test("unit/test_theory.py::test_table_1")
    assert not is_test("unit/test_theory.py::test_nothing") and not is_test("unit/test_theory.py")
