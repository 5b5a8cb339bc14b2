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


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    """Not with a word that leaves out the subject: the reader would have to know the caller."""
    words = {"What", "That", "Those", "Of", "Whether", "How", "As"}
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [
        f"{path.name}: {text}"
        for source in SOURCES
        for path in source.rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, kinds) and (text := ast.get_docstring(node))
        if text.split()[0].strip(",.:") in words
    ]
    assert not found
