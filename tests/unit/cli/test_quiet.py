"""Messages go to the standard error of the moment, and the handler is added once."""

from __future__ import annotations

import io
import logging
import sys

from foretoken.cli.command import StderrLines, quiet


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
