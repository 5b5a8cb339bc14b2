"""What takes longer than a second is told, once and while it lasts."""

from __future__ import annotations

import io
import logging
import re
import subprocess
import sys
from threading import Event
from time import monotonic, sleep

import pytest

from foretoken import slow_log
from foretoken.slow_log import log_if_slow, show_waiting

log = logging.getLogger("foretoken.slow_log.test")


class Heard(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.one = Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.one.set()


@pytest.fixture
def heard() -> Heard:
    handler = Heard()
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    yield handler
    log.removeHandler(handler)


def test_a_wait_is_told_while_it_lasts(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_log, "LOG_AFTER_SECONDS", 0.0)
    with log_if_slow(log, "loading %s", "T"):
        assert heard.one.wait(60)
    assert heard.lines == ["loading T"]


@pytest.mark.parametrize("on_terminal", [True, False])
def test_a_child_repeats_what_its_parents_terminal_shows(
    heard: Heard, monkeypatch: pytest.MonkeyPatch, on_terminal: bool
) -> None:
    """A server's engine cannot draw on it; elsewhere one line is enough."""
    monkeypatch.setattr(slow_log, "LOG_AFTER_SECONDS", 1e-9)
    monkeypatch.setattr(slow_log, "REPEAT_LOG_SECONDS", 0.01)
    monkeypatch.setattr(slow_log, "parent_process", lambda: "a server")
    stream = Terminal() if on_terminal else io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    with log_if_slow(log, "loading %s", "T"):
        assert heard.one.wait(60)
        deadline = monotonic() + (60 if on_terminal else 0.2)
        while monotonic() < deadline and (len(heard.lines) < 3 or not on_terminal):
            sleep(0.01)
    assert heard.lines[0] == "loading T"
    assert all(re.fullmatch(r"loading T: \d+ s so far", each) for each in heard.lines[1:])
    assert len(heard.lines) >= 3 if on_terminal else len(heard.lines) == 1


def test_what_is_over_at_once_is_not_told(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_log, "LOG_AFTER_SECONDS", 0.2)
    with pytest.raises(KeyError), log_if_slow(log, "loading"):
        raise KeyError
    assert not heard.one.wait(0.5)


def test_a_library_without_logging_tells_on_standard_error() -> None:
    """As Python prints warnings where no logging is set up; a level or a handler turns it off."""
    script = """
import logging, sys
from foretoken.slow_log import log_visibly
log = logging.getLogger("foretoken.loading.load")
log_visibly(log, "loading %s", "T")
logging.getLogger("foretoken").setLevel(logging.ERROR)
log_visibly(log, "not seen")
logging.getLogger("foretoken").setLevel(logging.NOTSET)
logging.getLogger("foretoken").addHandler(logging.NullHandler())
log_visibly(log, "nor this")
logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(levelname)s %(message)s")
log_visibly(log, "loading %s", "U")
"""
    run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert (run.stdout, run.stderr) == ("", "loading T\nINFO loading U\n")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_terminal_shows_what_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the seconds so far, work within work on lines of their own; nothing is left behind."""
    monkeypatch.setenv("TERM", "xterm")
    stream = Terminal()
    monkeypatch.setattr(sys, "stderr", stream)
    with log_if_slow(log, "loading %s", "[T]"), pytest.raises(KeyError):
        with show_waiting("converting T"):
            slow_log._DISPLAYS[0].refresh()
            print("a message", file=sys.stderr)
            raise KeyError
    assert not slow_log._DISPLAYS and sys.stderr is stream
    written = stream.getvalue()
    assert re.search(r"loading \[T\].*0:00:00", written) and "converting T" in written
    assert "a message\n" in written
    stream.truncate(0)
    with show_waiting("a second one"):
        slow_log._DISPLAYS[0].refresh()
    assert "a second one" in stream.getvalue() and "loading" not in stream.getvalue()


def test_a_pipe_gets_lines_alone(capsys: pytest.CaptureFixture[str]) -> None:
    with show_waiting("loading T"):
        pass
    assert capsys.readouterr().err == ""
