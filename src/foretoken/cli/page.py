"""What commands print for reading: wrapped at spaces on a terminal, in whole lines in a file; and
bars, on standard error."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from textwrap import wrap
from typing import TextIO, TypeVar

from rich.console import Console
from rich.progress import track
from rich.text import Text

LEAST = 80  # tables are made for it; a narrower terminal breaks the lines itself
WHOLE = 100_000  # wider than any line
T = TypeVar("T")


def page(stream: TextIO | None = None) -> Console:
    """Standard output or another stream, as wide as its terminal or as COLUMNS says."""
    file = stream or sys.stdout
    console = Console(file=file, highlight=False)
    sized = file.isatty() or "COLUMNS" in os.environ
    console.width = max(LEAST, console.width) if sized else WHOLE
    return console


def bar(items: Iterable[T], text: str, count: int | None = None) -> Iterable[T]:
    """The items, with a bar on standard error; count: how many, where they do not say."""
    return track(items, text, count, console=Console(stderr=True))


def prose(console: Console, paragraph: str, bold: str = "") -> None:
    """A paragraph, with `bold` in bold."""
    _put(console, "", paragraph, 0, bold)


def labelled(console: Console, rows: Iterable[tuple[str, str]], width: int) -> None:
    """Labels in a column of that width, each with its paragraph beside it."""
    for label, paragraph in rows:
        _put(console, label, paragraph, width)


def milliseconds(seconds: float) -> str:
    """For a narrow column: two decimals below 100, none above."""
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _put(console: Console, label: str, paragraph: str, width: int, bold: str = "") -> None:
    """A word wider than the page, such as a path, is not cut, so that it can be copied."""
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
