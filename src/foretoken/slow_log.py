"""Work that takes long is shown while it lasts: on a terminal with the seconds so far, elsewhere by
one log line after a second."""

from __future__ import annotations

import logging
import sys
from collections.abc import Generator
from contextlib import contextmanager
from logging import Logger
from multiprocessing import parent_process
from threading import Event, Lock, Thread
from time import perf_counter
from typing import Any

LOG_AFTER_SECONDS = 1.0  # seconds
REPEAT_LOG_SECONDS = (
    10.0  # seconds between the log lines of a child process, whose parent's terminal shows them
)

_DISPLAY_LOCK = Lock()
_DISPLAYS: list[
    Any
] = []  # what a terminal shows now: one display for all, or two would overwrite it


def log_visibly(log: Logger, message: str, *values: object) -> None:
    """Log at INFO; or at WARNING if no logging is set up, which prints it to standard error."""
    seen = log.isEnabledFor(logging.INFO) or log.hasHandlers()
    log.log(logging.INFO if seen else logging.WARNING, message, *values)


@contextmanager
def log_if_slow(
    log: Logger, message: str, *values: object, after: float | None = None
) -> Generator[None]:
    """Show this on a terminal until it is over; elsewhere log it if it takes longer than `after`
    seconds (None: AFTER)."""
    text, over = message % values, Event()
    if _can_draw():
        with show_waiting(text):
            yield
        return
    Thread(
        target=_log_until_over, args=(over, log, text, after or LOG_AFTER_SECONDS), daemon=True
    ).start()
    try:
        yield
    finally:
        over.set()


def _can_draw() -> bool:
    """Tell whether this process may draw on a terminal: a child's parent may write to the same."""
    return sys.stderr is not None and sys.stderr.isatty() and parent_process() is None


def _log_until_over(over: Event, log: Logger, text: str, after: float) -> None:
    """Log a text after a while, and again and again if a terminal shows the log of a child."""
    start = perf_counter()
    if over.wait(after):
        return
    log_visibly(log, "%s", text)
    while (
        parent_process() is not None and sys.stderr.isatty() and not over.wait(REPEAT_LOG_SECONDS)
    ):
        log_visibly(log, "%s: %.0f s so far", text, perf_counter() - start)


@contextmanager
def show_waiting(text: str) -> Generator[None]:
    """Show a line with the seconds so far on a terminal; nothing elsewhere, and nothing in child
    processes, whose parent may write to the same terminal."""
    if not _can_draw():
        yield
        return
    with _DISPLAY_LOCK:
        display = _DISPLAYS[0] if _DISPLAYS else _make_display()
        task = display.add_task(text)
        _DISPLAYS.append(display)
    try:
        yield
    finally:
        with _DISPLAY_LOCK:
            display.remove_task(task)
            _DISPLAYS.pop()
            if not _DISPLAYS:
                display.stop()


def _make_display() -> Any:
    from rich import console, progress  # late: it takes a tenth of a second

    text = progress.TextColumn("{task.description}", markup=False)
    display = progress.Progress(
        progress.SpinnerColumn(),
        text,
        progress.TimeElapsedColumn(),
        console=console.Console(stderr=True),
        transient=True,
    )
    display.start()
    return display
