"""What commands print for reading: wrapped at spaces on a terminal, in whole lines in a file."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from textwrap import wrap

from rich.console import Console
from rich.text import Text

LEAST = 80  # tables are made for it; a narrower terminal breaks the lines itself
WHOLE = 100_000  # no line is as wide


def page() -> Console:
    """Standard output, as wide as its terminal or as COLUMNS says."""
    console = Console(highlight=False)
    seen = sys.stdout.isatty() or "COLUMNS" in os.environ
    console.width = max(LEAST, console.width) if seen else WHOLE
    return console


def prose(console: Console, said: str, bold: str = "") -> None:
    """A paragraph, with `bold` in bold."""
    _put(console, "", said, 0, bold)


def labelled(console: Console, rows: Iterable[tuple[str, str]], room: int) -> None:
    """Labels in a column of so much room, and beside each what is said of it."""
    for label, said in rows:
        _put(console, label, said, room)


def milliseconds(seconds: float) -> str:
    """For a narrow column: three digits or more, and not two behind the point where they are."""
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _put(console: Console, label: str, said: str, room: int, bold: str = "") -> None:
    """A word wider than the page, such as a path, is left to the terminal: it can be copied."""
    lines = wrap(
        said,
        console.width,
        initial_indent=f"{label:<{room}}",
        subsequent_indent=" " * room,
        break_long_words=False,
        break_on_hyphens=False,
    )
    for line in lines:
        text = Text(line)
        if bold:
            text.highlight_words([bold], "bold")
        console.print(text, soft_wrap=True)
