"""The HTTP process's end of the pipe: requests go out, what becomes of them comes back. An engine
that dies is started again, and its requests are told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import count
from multiprocessing import get_context
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, NamedTuple, Protocol

from foretoken.server.process.messages import (
    Abort,
    Accepted,
    Add,
    Ask,
    Failed,
    FromEngine,
    GenerateRequest,
    Heard,
    ModelInfo,
    Ready,
    Refusal,
    Reply,
    StepOutput,
    StepOutputs,
    Stop,
    ToEngine,
    Transcribe,
    TranscribeRequest,
)
from foretoken.server.process.statistics import SpecDecodeStats
from foretoken.server.process.worker import Setup, work

State = Literal["loading", "ready", "restarting", "failed", "draining", "stopped"]
AGAIN = (1.0, 2.0, 5.0, 10.0, 30.0)  # seconds before an engine that died is started again
TICK = 1.0  # seconds between two looks at an engine
STALL = 300.0  # seconds without a step while somebody waits: tens are a slow machine's
READING = 0.1  # and for each token of prompts, which may be read in one step
NUMBERS = count()
log = logging.getLogger(__name__)


class RefusedRequest(Exception):
    """A request that the engine did not honour, or could not finish."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.kind, self.message, self.option = refusal.kind, refusal.message, refusal.option


class UnavailableError(Exception):
    """There is no engine now; `after`: seconds until it is worth another try."""

    def __init__(self, message: str, after: int) -> None:
        super().__init__(message)
        self.message, self.after = message, after


Told = Accepted | StepOutput | Heard | Reply | RefusedRequest | UnavailableError


class Pipe(Protocol):
    """The part of multiprocessing's `Connection` that is used: EOFError or OSError once the other
    end is gone."""

    def recv(self) -> Any: ...

    def send_bytes(self, buf: Any, /) -> None: ...


class Process(Protocol):
    """A process that ends with its engine."""

    def join(self, timeout: float) -> None:
        """Wait for its end, at most so many seconds."""
        ...

    def kill(self) -> None:
        """End it now, if it has not ended; its pipe ends too."""
        ...


class Child(NamedTuple):
    """An engine's process, while it loads or runs, and the pipe to it."""

    process: Process
    pipe: Pipe


def spawned(setup: Setup) -> Child:
    """An engine in a process of its own, which ends with this one."""
    context = get_context("spawn")  # a fork would take threads' locks along
    own_end, child_end = context.Pipe()
    process = context.Process(
        target=work, args=(child_end, setup), name="foretoken engine", daemon=True
    )
    process.start()
    child_end.close()
    return Child(process, own_end)


class EngineClient:
    """An engine's process, from `start` to `stop`. `begin`: what starts it, and does not wait."""

    def __init__(self, setup: Setup, begin: Callable[[Setup], Child] = spawned) -> None:
        self.setup, self._begin = setup, begin
        self.number = next(NUMBERS)  # unlike its `id`, no other's later
        self.statistics = SpecDecodeStats()
        self.state: State = "loading"
        self.info: ModelInfo | None = None  # once it has been ready
        self.problem = ""  # why it failed
        self.running = self.waiting = self.restarts = 0
        self.preempted = 0  # of all engines
        self._preempted = 0  # of this one
        self._ids = count()
        self._listeners: dict[int, Callable[[Told], None]] = {}  # of requests and questions
        self._prompts: dict[int, int] = {}  # tokens of each, where they are known
        self._stuck: set[int] = set()  # who has waited since the last step
        self._silent = 0.0  # seconds for which they have
        self._process: Process | None = None
        self._deaths = 0  # since it was ready last
        self._idle = asyncio.Event()
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self.failed = lambda: None  # called where no engine can be started

    @property
    def open(self) -> int:
        """Requests and questions without an end."""
        return len(self._listeners)

    @property
    def states(self) -> dict[str, int]:
        """The number of engines in each state: one engine, as a fleet of one."""
        return {self.state: 1}

    @property
    def _target(self) -> str:
        """The model's name in the log."""
        return "a model" if self.info is None else self.info.target

    def start(self) -> None:
        """Start the process; it is ready when `state` says so."""
        self._loop = asyncio.get_running_loop()
        self._process, pipe = self._begin(self.setup)
        self._outgoing.put(None)  # the end of the former
        self._outgoing = SimpleQueue()
        for name, life in (("events", self._listen), ("outgoing", self._post)):
            more = (self._outgoing,) if life == self._post else ()
            Thread(target=life, args=(pipe, *more), name=name, daemon=True).start()
        self._watch(self._process)

    async def stop(self, patience: float) -> None:
        """No new requests; those that run may end within so many seconds."""
        if self.state in ("draining", "stopped"):
            return
        listens, self.state = self.state == "ready", "draining"
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), patience)
        except TimeoutError:
            log.warning("%s requests of %s are cut off", len(self._listeners), self._target)
            self._fail("the server is shutting down; send the request to another, or later")
        self.state = "stopped"
        self._send(Stop())
        if self._process is not None:
            if listens:  # one that is loading does not
                await asyncio.to_thread(self._process.join, 5)
            self._process.kill()

    def submit(
        self, request: GenerateRequest, listener: Callable[[Told], None]
    ) -> Callable[[], None]:
        """Send a request, and call `listener` with all that becomes of it: `Accepted`, then what
        every step adds, the last with its end; or RefusedRequest. Return what ends the request
        early, which frees its row within a step. Raises UnavailableError."""
        self._require_ready()
        id = self._open(listener)
        self._send(Add(id, request))
        return partial(self._abort, id)

    def transcribe(
        self, request: TranscribeRequest, listener: Callable[[Told], None]
    ) -> Callable[[], None]:
        """Send a sound, and call `listener` with all that becomes of it: `Heard` with new text,
        then `Reply` with the transcription; or RefusedRequest. Return what ends it early. Raises
        UnavailableError."""
        self._require_ready()
        id = self._open(listener)
        self._send(Transcribe(id, request))
        return partial(self._abort, id)

    async def ask(self, name: str, **arguments: Any) -> Any:
        """Return the answer to a question that takes no step. Raises RefusedRequest and
        UnavailableError."""
        self._require_ready()
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        id = self._open(partial(_settle, answer))
        try:
            self._send(Ask(id, name, arguments))
            return await answer
        finally:
            self._close(id)

    def _abort(self, id: int) -> None:
        if id in self._listeners:
            self._close(id)
            self._send(Abort(id))

    def _require_ready(self) -> None:
        if self.state == "ready":
            return
        reasons = {
            "loading": "the model is loading",
            "restarting": "the engine is starting again",
            "failed": f"the engine cannot start: {self.problem}",
        }
        raise UnavailableError(reasons.get(self.state, "the server is shutting down"), 2)

    def _open(self, listener: Callable[[Told], None]) -> int:
        id = next(self._ids)
        self._listeners[id] = listener
        self._idle.clear()
        return id

    def _close(self, id: int) -> None:
        self._listeners.pop(id, None)
        self._prompts.pop(id, None)
        self._note_idle()

    def _note_idle(self) -> None:
        if not self._listeners:
            self._idle.set()

    def _send(self, message: ToEngine) -> None:
        """Hand it to the thread that sends: a pipe that is full makes its writer wait."""
        try:
            self._outgoing.put(ForkingPickler.dumps(message))
        except RecursionError:
            problem = "the request is nested too deeply; flatten it"
            id = getattr(message, "id", -1)
            self._deliver(Refusal(id, "input", problem, _deepest(message)))

    @staticmethod
    def _post(pipe: Pipe, outgoing: SimpleQueue[Any]) -> None:
        """A thread's life: what the engine is told."""
        while (message := outgoing.get()) is not None:
            try:
                pipe.send_bytes(message)
            except (OSError, ValueError):  # it has died, which `_listen` sees too
                return

    def _listen(self, pipe: Pipe) -> None:
        """A thread's life: what the engine says, to the loop."""
        while True:
            try:
                message: FromEngine | None = pipe.recv()
            except Exception as error:  # of what it said last, nothing can be told
                if not isinstance(error, EOFError | OSError):
                    log.exception("the engine cannot be understood")
                message = None
            try:
                self._loop.call_soon_threadsafe(self._hear, message)
            except RuntimeError:  # the loop is closed
                return
            if message is None:
                return

    def _hear(self, message: FromEngine | None) -> None:
        match message:
            case StepOutputs(parts, running, waiting, preempted):
                self.running, self.waiting = running, waiting
                self.preempted += preempted - self._preempted
                self._preempted = preempted
                self._stuck.clear()
                for part in parts:
                    self._deliver(part)
            case Heard():
                self._stuck.clear()
                self._deliver(message)
            case Accepted() | Reply() | Refusal():
                self._deliver(message)
            case Ready(info):
                self.info, self._deaths = info, 0
                self.setup = replace(self.setup, adapters=())  # when it starts again, they run
                log.info("%s is ready, on %s", info.target, info.runtime)
                if self.state in ("loading", "restarting"):
                    self.state = "ready"
            case Failed(problem):
                self.state, self.problem = "failed", problem
                self.failed()
            case None:
                self._died()

    def _deliver(self, message: Accepted | Heard | Reply | Refusal | StepOutput) -> None:
        listener = self._listeners.get(message.id)
        if listener is None:  # nobody waits any more
            return
        match message:
            case Accepted(id, prompt_tokens):
                self._prompts[id] = prompt_tokens
            case Heard() | StepOutput(done=None):
                pass
            case _:
                self._close(message.id)
        listener(RefusedRequest(message) if isinstance(message, Refusal) else message)

    def _watch(self, process: Process) -> None:
        """Every second, as no clock is to be trusted after a suspension: an engine that takes no
        step for those who wait hangs. It is ended, which `_listen` hears."""
        if process is not self._process:
            return
        self._loop.call_later(TICK, self._watch, process)
        self._stuck &= self._listeners.keys()
        if not self._stuck:
            self._stuck, self._silent = set(self._listeners), 0.0
            return
        self._silent += TICK
        if self._silent > STALL + READING * sum(self._prompts.values()):
            idle = self._silent
            log.error(
                "the engine of %s has taken no step for %.0f s; it is ended", self._target, idle
            )
            self._stuck.clear()
            process.kill()

    def _fail(self, reason: str) -> None:
        for id in list(self._listeners):
            self._deliver(Refusal(id, "dead", reason))

    def _died(self) -> None:
        """The process is gone: its requests fail, and another one is started."""
        if self._process is not None:
            self._process.kill()  # what only closed its pipe
        self.running = self.waiting = self._preempted = 0
        if self.state not in ("failed", "stopped", "draining"):
            self.state = "restarting"
            after = AGAIN[min(self._deaths, len(AGAIN) - 1)]
            self._deaths += 1
            self.restarts += 1
            log.error("the engine of %s ended; it is started again in %s s", self._target, after)
            self._loop.call_later(after, self._restart)
        self._fail("the engine stopped while it wrote this text; send the request again")

    def _restart(self) -> None:
        if self.state == "restarting":
            self.start()


def _deepest(message: ToEngine) -> str | None:
    """Return the argument that is nested too deeply to be sent."""
    arguments: dict[str, Any] = {}
    match message:
        case Add(_, request):
            own = {each.name: getattr(request, each.name) for each in fields(request)}
            arguments = {**request.controls, **own}
        case Ask(_, _, asked):
            arguments = asked
        case _:
            pass
    for name, value in arguments.items():
        try:
            ForkingPickler.dumps(value)
        except RecursionError:
            return name
    return None


def _settle(answer: asyncio.Future[Any], message: Told) -> None:
    if answer.done():  # nobody waits any more
        return
    if isinstance(message, Exception):
        answer.set_exception(message)
    else:
        assert isinstance(message, Reply)
        answer.set_result(message.value)
