"""A class name stands for one thing: no two modules define the same."""

from __future__ import annotations

import ast
import re
from collections import Counter

from scripts import ROOT

TREES = {
    path: ast.parse(path.read_text(encoding="utf-8"))
    for folder in ("src/foretoken", "reproduction")
    for path in (ROOT / folder).rglob("*.py")
    if "tests" not in path.relative_to(ROOT).parts
}


def test_each_class_name_is_defined_once() -> None:
    nodes = (node for tree in TREES.values() for node in ast.walk(tree))
    names = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    assert not [name for name, count in names.items() if count > 1]


def test_sentences_of_docstrings_have_a_subject() -> None:
    """They begin with a verb or a noun: else the reader would have to know the caller."""
    start = re.compile(r"(?:^|[.:?!]\s+)(?:What|That|Those|Of|Whether)\b.*|^(?:How|As)\b.*")
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    wrong = [
        f"{path.name}: {match.group()}"
        for path, tree in TREES.items()
        for node in ast.walk(tree)
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        for match in start.finditer(text)
    ]
    assert not wrong
