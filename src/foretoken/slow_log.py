"""Progress of slow work: on a terminal, a line with the elapsed seconds; elsewhere, one log line
when the work has taken a second."""

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

LOG_AFTER_SECONDS = 1.0
REPEAT_LOG_SECONDS = 10.0  # between log lines of a child process, on its parent's terminal

_DISPLAY_LOCK = Lock()
# one display, listed once per line that it shows: a second display would overwrite its lines
_DISPLAYS: list[Any] = []


def log_visibly(log: Logger, message: str, *values: object) -> None:
    """Log at INFO, or at WARNING if logging is not set up, so that Python prints to stderr."""
    visible = log.isEnabledFor(logging.INFO) or log.hasHandlers()
    log.log(logging.INFO if visible else logging.WARNING, message, *values)


@contextmanager
def log_if_slow(
    log: Logger, message: str, *values: object, after: float | None = None
) -> Generator[None]:
    """Show the message on a terminal while the `with` block runs. Without a terminal, log the
    message if the block takes longer than `after` seconds (None: `LOG_AFTER_SECONDS`)."""
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
    """Return whether stderr is a terminal and this is the main process: the parent of a child
    process may draw on the same terminal."""
    return sys.stderr is not None and sys.stderr.isatty() and parent_process() is None


def _log_until_over(over: Event, log: Logger, text: str, after: float) -> None:
    """Log `text` after `after` seconds unless `over` is set. In a child process on a terminal,
    repeat the log until `over` is set."""
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
    """Show `text` and the elapsed seconds on a terminal while the `with` block runs. Show nothing
    without a terminal, or in a child process."""
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
    from rich import console, progress  # imported late: takes a tenth of a second

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
