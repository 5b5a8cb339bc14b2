"""Whoever waits is told for what: one line after a second, and on a terminal the seconds so far."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from logging import Logger
from multiprocessing import parent_process
from threading import Lock, Timer
from typing import Any

AFTER = 1.0  # seconds

_LOCK = Lock()
_SHOWN: list[Any] = []  # what a terminal shows now: one display for all, or two would overwrite it


def tell(log: Logger, message: str, *values: object) -> None:
    """Log at INFO; or at WARNING if no logging is set up, which prints it to standard error."""
    seen = log.isEnabledFor(logging.INFO) or log.hasHandlers()
    log.log(logging.INFO if seen else logging.WARNING, message, *values)


@contextmanager
def log_if_slow(
    log: Logger, message: str, *values: object, after: float | None = None
) -> Generator[None]:
    """Tell this if what happens meanwhile takes longer than `after` seconds (None: AFTER), and show
    it on a terminal until it is over."""
    timer = Timer(after or AFTER, tell, (log, message, *values))
    timer.daemon = True
    timer.start()
    try:
        with show_waiting(message % values):
            yield
    finally:
        timer.cancel()


@contextmanager
def show_waiting(text: str) -> Generator[None]:
    """Show a line with the seconds so far on a terminal; nothing elsewhere, and nothing in child
    processes, whose parent may write to the same terminal."""
    if sys.stderr is None or not sys.stderr.isatty() or parent_process() is not None:
        yield
        return
    with _LOCK:
        display = _SHOWN[0] if _SHOWN else _display()
        task = display.add_task(text)
        _SHOWN.append(display)
    try:
        yield
    finally:
        with _LOCK:
            display.remove_task(task)
            _SHOWN.pop()
            if not _SHOWN:
                display.stop()


def _display() -> Any:
    from rich.console import Console  # late: it takes a tenth of a second
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    text = TextColumn("{task.description}", markup=False)
    display = Progress(
        SpinnerColumn(),
        text,
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    )
    display.start()
    return display
