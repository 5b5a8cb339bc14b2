"""Arguments of an engine's process, and the process's entry point.

Does not import torch, as the HTTP process imports this file.
"""

from __future__ import annotations

import os
import signal
import sys
from dataclasses import dataclass, field
from multiprocessing import parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from threading import Thread
from typing import Any

from foretoken.engine.options import AllEngineKeywords
from foretoken.server.options import Logs

SWITCH_INTERVAL_S = 0.0005  # a thread that prepares a request yields to the engine's after that


@dataclass(frozen=True, slots=True)
class Setup:
    """Arguments of an engine's process: those of `foretoken.load` and of `Engine`."""

    target: str | None
    draft: str | None
    loading: dict[str, Any] = field(default_factory=dict[str, Any])
    engine: AllEngineKeywords = field(default_factory=AllEngineKeywords)
    logs: Logs = Logs()
    costs: bytes | None = None  # pickled costs of steps, if they were measured elsewhere
    adapters: tuple[str, ...] = ()  # of engines that start later: checked before this one loads
    chat_template: str | None = None  # None: the model's own
    tool_parser: str = "auto"
    max_pixels: int = 25_000_000  # of an image
    max_seconds: int = 3600  # of audio


def work(pipe: Connection, setup: Setup) -> None:
    """Run the engine's process from its start to its end."""
    for name in (signal.SIGINT, signal.SIGTERM):  # which reach the whole group: the pipe says when
        signal.signal(name, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    setup.logs.begin()
    Thread(target=end_with, args=(parent_process(),), name="end", daemon=True).start()
    from foretoken.server.process.startup import serve  # late: imports torch

    serve(pipe, setup)


def end_with(parent: BaseProcess | None) -> None:
    """End this process with its parent: while it loads, or if a step hangs, it does not see the
    pipe's end."""
    if parent is not None:
        parent.join()
        os._exit(1)
