"""What takes longer than a second is told, once and while it lasts."""

from __future__ import annotations

import logging
from threading import Event

import pytest

from foretoken import slow_log
from foretoken.slow_log import log_if_slow

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
    monkeypatch.setattr(slow_log, "AFTER", 0.0)
    with log_if_slow(log, "loading %s", "T"):
        assert heard.one.wait(60)
    assert heard.lines == ["loading T"]


def test_what_is_over_at_once_is_not_told(heard: Heard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slow_log, "AFTER", 0.2)
    with pytest.raises(KeyError), log_if_slow(log, "loading"):
        raise KeyError
    assert not heard.one.wait(0.5)
