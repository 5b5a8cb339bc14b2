"""What comes of one prompt, wherever its model runs, and how it is printed as it comes: tokens in
the colours of their fates, where these are asked for and known."""

from __future__ import annotations

import re
import sys
from collections import deque
from collections.abc import Generator, Mapping
from dataclasses import dataclass, field
from os.path import commonprefix
from typing import Any, NamedTuple, Protocol

from rich.console import Console
from rich.text import Text

from foretoken.errors import ForetokenError
from foretoken.lab import view

PLAIN = "plain"  # no guess was made
STYLES = {"accepted": view.ACCEPTED, "corrected": view.CORRECTED, "bonus": view.CORRECTED}
CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")  # what a terminal may take for orders

Prompt = str | list[dict[str, Any]]  # a text to continue, or messages


class TextError(ForetokenError):
    """A text failed: the next one may not."""


class Token(NamedTuple):
    """A token as it is spelled behind those before it, and what became of the guess."""

    text: str
    fate: str  # accepted, corrected, bonus, plain


class Part(NamedTuple):
    """What may be shown of a text since the last part, and the tokens of the steps since: they may
    be ahead of the text, of which a stop string holds some back."""

    text: str
    tokens: list[Token]


@dataclass(slots=True)
class Reply:
    """What has come of a prompt so far."""

    text: str = ""
    tokens: int = 0
    calls: int = 0  # target runs; 0 where nobody told
    drafted: int = 0
    accepted: int = 0
    overlaps: list[float] = field(default_factory=list[float])
    bias: float = 0.0  # summed over the tokens
    seconds: float = 0.0
    finish_reason: str | None = None  # None: broken off


class Source(Protocol):
    """What answers: a model in this process, or a server."""

    @property
    def name(self) -> str:
        """The target's, and the draft's."""
        ...

    @property
    def runtime(self) -> str:
        """What they run on; "" where nobody told."""
        ...

    @property
    def colours(self) -> bool:
        """Whether it says what became of the guesses."""
        ...

    def require(self, wishes: Mapping[str, Any]) -> None:
        """InputError or RefusedError for wishes that it cannot honour."""
        ...

    def parts(
        self, prompt: Prompt, wishes: Mapping[str, Any], number: int, reply: Reply
    ) -> Generator[Part]:
        """What comes of the prompt, `reply` counting along. Closed early, the text is dropped.
        number: how many prompts came before. TextError where the text fails."""
        ...


class Printer:
    """Texts on standard output, part by part."""

    def __init__(self, *, coloured: bool) -> None:
        self.console = Console(highlight=False)
        self.coloured, self._terminal = coloured, sys.stdout.isatty()
        self._marks = self.console.color_system is None or self.console.no_color
        self._tokens: deque[Token] = deque()
        self.begun = False

    @property
    def legend(self) -> Text:
        return view.legend(marks=self._marks, rejected=False)

    def put(self, part: Part) -> None:
        """The next part of the text."""
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
        """The text is over."""
        print(flush=True)
        self._tokens.clear()
        self.begun = False

    def _coloured(self, text: str) -> Generator[tuple[str, str]]:
        """The text in pieces with their styles. What its tokens spell otherwise, as parts of
        characters, has none."""
        while text and self._tokens:
            spelled, fate = self._tokens.popleft()
            shared = len(commonprefix([text, spelled]))
            if not shared:
                shared = text.find(spelled) if spelled else 0
                if shared > 0:
                    yield text[:shared], ""
                    self._tokens.appendleft(Token(spelled, fate))
            else:
                yield text[:shared], STYLES.get(fate, "")
                if shared < len(spelled):
                    self._tokens.appendleft(Token(spelled[shared:], fate))
            text = text[max(0, shared) :]
        if text:
            yield text, ""
