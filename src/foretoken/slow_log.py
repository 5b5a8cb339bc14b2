"""Whoever waits for longer than a second is told for what: one line at INFO."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from logging import Logger
from threading import Timer

AFTER = 1.0  # seconds


@contextmanager
def log_if_slow(log: Logger, message: str, *values: object) -> Generator[None]:
    """Log this if what happens meanwhile takes longer."""
    timer = Timer(AFTER, log.info, (message, *values))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
