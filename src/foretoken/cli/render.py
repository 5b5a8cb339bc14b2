"""Printing of tables, paragraphs and progress bars. Paragraphs are wrapped on a terminal; in a
file, each paragraph is a single line. Progress bars are drawn on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from textwrap import wrap
from typing import TextIO, TypeVar

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

MIN_COLUMNS = 80  # the width that tables need; a narrower terminal wraps the lines itself
UNLIMITED_COLUMNS = 100_000  # wider than any line
ItemType = TypeVar("ItemType")


def open_console(stream: TextIO | None = None) -> Console:
    """Return a console on `stream`, by default standard output. The console is as wide as the
    terminal or the environment variable COLUMNS; without either, lines are not wrapped."""
    file = stream or sys.stdout
    # brackets and colons in names and paths are neither markup nor emoji
    console = Console(file=file, highlight=False, markup=False, emoji=False)
    sized = file.isatty() or "COLUMNS" in os.environ
    console.width = max(MIN_COLUMNS, console.width) if sized else UNLIMITED_COLUMNS
    return console


def track_progress(
    items: Iterable[ItemType], text: str, count: int | None = None
) -> Iterable[ItemType]:
    """Yield the items and advance a progress bar on standard error. `count`: the number of items,
    needed if `items` has no length."""
    return track(items, text, count, console=Console(stderr=True))


def make_table(*headings: str, left: int = 1, gap: int = 1) -> Table:
    """Return a table without a frame. The first `left` columns are aligned to the left; the other
    columns hold numbers, aligned to the right. `gap`: additional blanks between columns."""
    padding = (0, gap, 0, 0)
    view = Table(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False)
    for i, heading in enumerate(headings):
        number = i >= left
        justify = "right" if number else "left"
        view.add_column(heading, justify=justify, no_wrap=number, overflow="fold")
    return view


def print_paragraph(console: Console, paragraph: str, bold: str = "") -> None:
    """Print a paragraph, with the words `bold` in it in bold."""
    _print_wrapped(console, "", paragraph, 0, bold)


def print_labelled(console: Console, rows: Iterable[tuple[str, str]], width: int) -> None:
    """Print labels with their paragraphs: the labels in a column of `width` characters, and the
    paragraphs in a second column."""
    for label, paragraph in rows:
        _print_wrapped(console, label, paragraph, width)


def format_milliseconds(seconds: float) -> str:
    """Return seconds as milliseconds, with two decimals below 100 ms and none above."""
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _print_wrapped(
    console: Console, label: str, paragraph: str, width: int, bold: str = ""
) -> None:
    """Print wrapped lines; a word wider than the console, such as a path, is not broken."""
    lines = wrap(
        paragraph,
        console.width,
        initial_indent=f"{label:<{width}}",
        subsequent_indent=" " * width,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        text = Text(line)
        if bold:
            text.highlight_words([bold], "bold")
        console.print(text, soft_wrap=True)
