"""Messages go to the standard error of the moment, and the handler is added once."""

from __future__ import annotations

import io
import logging
import sys

from foretoken.cli.command import StderrLines, printed, quiet


def test_messages_follow_standard_error(monkeypatch):
    log = logging.getLogger("foretoken")
    monkeypatch.setattr(log, "handlers", [])
    quiet()
    quiet()
    assert [type(handler) for handler in log.handlers] == [StderrLines]
    for _ in range(2):  # a bar puts another stream in its place
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        log.warning("a %s", "message")
        assert sys.stderr.getvalue() == "a message\n"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_messages_begin_lines_of_a_terminal(monkeypatch):
    """Not in the middle of a text that is written there, once for each break."""
    screen = Terminal()
    monkeypatch.setattr(StderrLines, "within_line", False)
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    log = logging.Logger("of this test")
    log.addHandler(StderrLines())
    for text in ("The", " capital\n", "is", ""):
        print(text, end="")
        printed(text)
        log.warning("a message")
    assert screen.getvalue() == "The\na message\n capital\na message\nis\na message\na message\n"


def test_a_text_in_a_file_stays_whole(monkeypatch):
    monkeypatch.setattr(StderrLines, "within_line", False)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    printed("The")
    log = logging.Logger("of this test")
    log.addHandler(StderrLines())
    log.warning("a message")
    assert sys.stderr.getvalue() == "a message\n"
