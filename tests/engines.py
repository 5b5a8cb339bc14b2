"""Engines in threads of this process, for tests of what stands before them."""

from __future__ import annotations

from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread

from foretoken import Engine, Speculator, load
from foretoken.drafters.lm import LMDrafter
from foretoken.generation_config import EndTokens
from foretoken.server.process.client import Child
from foretoken.server.process.messages import EngineSetup
from foretoken.server.process.replies import ReplyPreparer
from foretoken.server.process.sandbox import MediaSandbox
from foretoken.server.process.worker import Worker
from oracle import random_model
from table import TableModel
from tiny import byte_level

V = 320
P, Q = (random_model(seed, V) for seed in (1, 2))


class Threaded:
    """An engine that can be killed at any time, as a process can: its pipe ends. Over table models,
    or those that the setup names, or over `spec`."""

    def __init__(
        self, setup: EngineSetup, *, loads: bool = False, spec: Speculator | None = None
    ) -> None:
        self.pipe, theirs = Pipe()
        self.theirs = theirs
        if spec is None:
            spec = load(setup.target, setup.draft, **setup.loading) if loads else speculator()
        self.spec = spec
        self.engine = Engine(self.spec, **setup.engine)
        replies = ReplyPreparer(self.spec.tokenizer, setup.chat_template, setup.tool_parser)
        media = MediaSandbox(setup.max_pixels, setup.max_seconds)
        worker = Worker(theirs, self.spec, self.engine, replies, media)
        self.thread = Thread(target=worker.run, daemon=True)
        self.thread.start()

    def join(self, timeout: float) -> None:
        self.thread.join(timeout)

    def kill(self) -> None:
        for end in (self.theirs, self.pipe):
            _shut(end)


def speculator() -> Speculator:
    target = TableModel(P, V, context=400)
    return Speculator(target, LMDrafter(TableModel(Q, V), V), byte_level(), EndTokens())


def threaded(made: list[Threaded]):
    """What begins such engines, and keeps them in a list."""

    def begin(setup: EngineSetup) -> Child:
        made.append(Threaded(setup))
        return Child(made[-1], made[-1].pipe)

    return begin


def loaded(setup: EngineSetup) -> Child:
    """An engine over the models that the setup names, which are loaded at once."""
    engine = Threaded(setup, loads=True)
    return Child(engine, engine.pipe)


def _shut(end: Connection) -> None:
    """For whoever reads or writes there now, too."""
    import os
    import socket

    try:
        with socket.socket(fileno=os.dup(end.fileno())) as held:
            held.shutdown(socket.SHUT_RDWR)
    except OSError:
        pass  # it is closed
