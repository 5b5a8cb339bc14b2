"""Messages go to the standard error of the moment, and the handler is added once."""

from __future__ import annotations

import io
import logging
import sys

from foretoken.cli.command import StderrLines, hold_messages, release_messages, set_up_logging


def test_messages_follow_standard_error(monkeypatch):
    log = logging.getLogger("foretoken")
    monkeypatch.setattr(log, "handlers", [])
    set_up_logging()
    set_up_logging()
    assert [type(handler) for handler in log.handlers] == [StderrLines]
    for _ in range(2):  # a bar puts another stream in its place
        monkeypatch.setattr(sys, "stderr", io.StringIO())
        log.warning("a %s", "message")
        assert sys.stderr.getvalue() == "a message\n"


def test_messages_wait_for_the_end_of_an_answer(monkeypatch):
    """On a terminal and in a pipe, where standard output and error may be one."""
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    log = logging.Logger("of this test")
    log.addHandler(StderrLines())
    log.warning("before")
    for text in ("The", " capital\n", "is", ""):
        hold_messages()
        print(text, end="")
        log.warning("after %r", text)
    print()
    release_messages()
    log.warning("later")
    release_messages()
    after = "".join(f"after {text!r}\n" for text in ("The", " capital\n", "is", ""))
    assert screen.getvalue() == f"before\nThe capital\nis\n{after}later\n"
