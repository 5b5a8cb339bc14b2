"""A class name stands for one thing: no two modules define the same."""

from __future__ import annotations

import ast
from collections import Counter
from pathlib import Path

import foretoken
import foretoken_lab

SOURCES = [Path(package.__file__ or "").parent for package in (foretoken, foretoken_lab)]


def test_each_class_name_is_defined_once() -> None:
    names = Counter(
        node.name
        for source in SOURCES
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    )
    assert not [name for name, count in names.items() if count > 1]
