"""Printing for reading: nothing is wider than the page but words that are, and no word is cut."""

from __future__ import annotations

import io
import sys

import pytest
from rich.console import Console

from foretoken.cli.render import (
    MIN_COLUMNS,
    UNLIMITED_COLUMNS,
    open_console,
    print_labelled,
    print_paragraph,
)

SAID = "alpha is [not] markup, and/or a long-winded paragraph: some eighty letters in many words"


def printed(width: int) -> tuple[Console, io.StringIO]:
    out = io.StringIO()
    return Console(file=out, width=width), out


@pytest.mark.parametrize("width", [20, 80])
def test_words_stay_whole(width: int):
    console, out = printed(width)
    print_paragraph(console, SAID)
    lines = out.getvalue().splitlines()
    assert all(len(line) <= width for line in lines) and len(lines) > 1
    assert " ".join(lines) == SAID


def test_a_word_wider_than_the_page_is_left_to_the_terminal():
    console, out = printed(20)
    print_paragraph(console, "in /a/path/that/is/very/long/indeed it is")
    assert out.getvalue() == "in\n/a/path/that/is/very/long/indeed\nit is\n"


def test_what_is_said_stands_beside_its_label():
    console, out = printed(20)
    print_labelled(console, [("c", "cost of a guess"), ("v", "of a pass over gamma + 1")], 4)
    assert out.getvalue() == "c   cost of a guess\nv   of a pass over\n    gamma + 1\n"


def test_a_file_has_whole_lines_and_a_terminal_its_width(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert open_console().width == UNLIMITED_COLUMNS
    for columns, width in (("120", 120), ("40", MIN_COLUMNS)):
        monkeypatch.setenv("COLUMNS", columns)
        assert open_console().width == width
    monkeypatch.delenv("COLUMNS")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    assert open_console().width < UNLIMITED_COLUMNS
