"""Printing for readers: paragraphs wrapped at spaces on a terminal and in whole lines in a file,
progress bars on standard error, and replies as they come."""

from __future__ import annotations

import os
import re
import sys
from collections import deque
from collections.abc import Generator, Iterable
from os.path import commonprefix
from textwrap import wrap
from typing import TYPE_CHECKING, TextIO, TypeVar

from rich import box
from rich.console import Console
from rich.progress import track
from rich.table import Table
from rich.text import Text

from foretoken.lab import view

if TYPE_CHECKING:
    from foretoken.cli.sources import ReplyPart, ReplyToken

LEAST = 80  # columns that tables are made for; a narrower terminal breaks the lines itself
WHOLE = 100_000  # columns, more than any line has
STYLES = {"accepted": view.ACCEPTED, "corrected": view.CORRECTED, "bonus": view.CORRECTED}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # characters a terminal may take for orders
T = TypeVar("T")


def page(stream: TextIO | None = None) -> Console:
    """Open a console on standard output or another stream, as wide as its terminal or COLUMNS."""
    file = stream or sys.stdout
    console = Console(file=file, highlight=False)
    sized = file.isatty() or "COLUMNS" in os.environ
    console.width = max(LEAST, console.width) if sized else WHOLE
    return console


def bar(items: Iterable[T], text: str, count: int | None = None) -> Iterable[T]:
    """Yield the items, with a progress bar on standard error; count: their number, if unsized."""
    return track(items, text, count, console=Console(stderr=True))


def table(*headings: str, left: int = 1, gap: int = 1) -> Table:
    """Make a table without a frame; columns behind the first `left` hold numbers.

    gap: blanks between columns, beside the rule's own.
    """
    padding = (0, gap, 0, 0)
    view = Table(box=box.SIMPLE_HEAD, padding=padding, pad_edge=False, show_edge=False)
    for i, heading in enumerate(headings):
        number = i >= left
        justify = "right" if number else "left"
        view.add_column(heading, justify=justify, no_wrap=number, overflow="fold")
    return view


def prose(console: Console, paragraph: str, bold: str = "") -> None:
    """Print a paragraph, with the word `bold` in bold."""
    _put(console, "", paragraph, 0, bold)


def labelled(console: Console, rows: Iterable[tuple[str, str]], width: int) -> None:
    """Print labels in a column of that width, each with its paragraph beside it."""
    for label, paragraph in rows:
        _put(console, label, paragraph, width)


def milliseconds(seconds: float) -> str:
    """Format for a narrow column: two decimals below 100 ms, none above."""
    ms = seconds * 1e3
    return f"{ms:.2f}" if ms < 100 else f"{ms:.0f}"


def _put(console: Console, label: str, paragraph: str, width: int, bold: str = "") -> None:
    """Print wrapped lines; a word wider than the page, such as a path, stays whole."""
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


class Printer:
    """Prints replies on standard output, part by part; draft tokens in colour where asked for."""

    def __init__(self, *, coloured: bool) -> None:
        self.console = Console(highlight=False)
        self.coloured, self._terminal = coloured, sys.stdout.isatty()
        self._marks = self.console.color_system is None or self.console.no_color
        self._tokens: deque[ReplyToken] = deque()
        self.begun = False

    @property
    def legend(self) -> Text:
        return view.legend(marks=self._marks, rejected=False)

    def put(self, part: ReplyPart) -> None:
        """Print the next part of the text."""
        self._tokens.extend(part.tokens)
        text = CONTROL.sub("", part.text) if self._terminal else part.text
        if not text:
            return
        self.begun = True
        if not self.coloured:
            print(text, end="", flush=True)
            return
        for spelled, style in self._coloured(text):
            marked = self._marks and style and not spelled.isspace()
            displayed = view.marked(spelled, style) if marked else spelled
            self.console.print(Text(displayed, style), end="", soft_wrap=True)

    def end(self) -> None:
        """End the text."""
        print(flush=True)
        self._tokens.clear()
        self.begun = False

    def _coloured(self, text: str) -> Generator[tuple[str, str]]:
        """Split the text into pieces with their styles.

        Text that its tokens spell otherwise, such as parts of characters, has no style.
        """
        while text and self._tokens:
            token = self._tokens.popleft()
            shared = len(commonprefix([text, token.text]))
            if not shared:
                shared = text.find(token.text) if token.text else 0
                if shared > 0:
                    yield text[:shared], ""
                    self._tokens.appendleft(token)
            else:
                yield text[:shared], STYLES.get(token.fate, "")
                if shared < len(token.text):
                    self._tokens.appendleft(token._replace(text=token.text[shared:]))
            text = text[max(0, shared) :]
        if text:
            yield text, ""
