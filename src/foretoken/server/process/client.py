"""The HTTP process's end of the pipe: it sends requests and receives outputs. An engine that dies
is started again, and its requests fail.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import sys
from collections.abc import Callable
from dataclasses import fields, replace
from functools import partial
from itertools import count
from multiprocessing import get_context, parent_process
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from queue import SimpleQueue
from threading import Thread
from typing import Any, Literal, NamedTuple, Protocol

from foretoken.server.process.messages import (
    Abort,
    Accepted,
    Add,
    AnyRequest,
    Ask,
    EngineSetup,
    FromEngine,
    GenerateRequest,
    LoadFailed,
    ModelInfo,
    Query,
    Refusal,
    Reply,
    StepOutput,
    StepOutputs,
    Stop,
    ToEngine,
    TranscriptDelta,
)
from foretoken.server.process.statistics import SpecDecodeStats

State = Literal["loading", "ready", "restarting", "failed", "draining", "stopped"]
RESTART_DELAYS_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # after deaths without a ready engine between
CHECK_INTERVAL_S = 1.0  # between two looks at an engine
STALL_TIMEOUT_S = 300.0  # without a step while requests wait: tens are a slow machine's
PREFILL_S_PER_TOKEN = 0.1  # added for each token of the prompts, which one step may prefill
SWITCH_INTERVAL_S = 0.0005  # a thread that prepares a request yields to the engine's after that
ENGINE_NUMBERS = count()
log = logging.getLogger(__name__)


class RefusedRequest(Exception):
    """A request that the engine refused, or could not finish."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.kind, self.message, self.option = refusal.kind, refusal.message, refusal.option


class UnavailableError(Exception):
    """There is no engine now; `retry_after`: seconds until a retry is worthwhile."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.message, self.retry_after = message, retry_after


Notification = Accepted | StepOutput | TranscriptDelta | Reply | RefusedRequest | UnavailableError
Listener = Callable[[Notification], None]


class Pipe(Protocol):
    """The part of multiprocessing's `Connection` that is used: EOFError or OSError once the other
    end is gone."""

    def recv(self) -> Any: ...

    def send_bytes(self, buf: Any, /) -> None: ...


class Process(Protocol):
    """A process that ends with its engine: the part of multiprocessing's that is used. `kill` ends
    its pipe, too."""

    def join(self, timeout: float) -> None: ...

    def kill(self) -> None: ...


class Child(NamedTuple):
    """An engine's process, while it loads or runs, and the pipe to it."""

    process: Process
    pipe: Pipe


def spawn(setup: EngineSetup) -> Child:
    """Start an engine in a process of its own, which ends with this one."""
    context = get_context("spawn")  # a fork would take threads' locks along
    own_end, child_end = context.Pipe()
    process = context.Process(
        target=run_engine_process, args=(child_end, setup), name="foretoken engine", daemon=True
    )
    process.start()
    child_end.close()
    return Child(process, own_end)


def run_engine_process(pipe: Connection, setup: EngineSetup) -> None:
    """Run the engine's process from its start to its end."""
    for name in (signal.SIGINT, signal.SIGTERM):  # which reach the whole group: the pipe says when
        signal.signal(name, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    setup.log_options.configure()
    Thread(target=_exit_with_parent, args=(parent_process(),), name="end", daemon=True).start()
    from foretoken.server.process.startup import serve  # late: imports torch

    serve(pipe, setup)


def _exit_with_parent(parent: BaseProcess | None) -> None:
    """End this process with its parent: while it loads, or if a step hangs, it does not see the
    pipe's end."""
    if parent is not None:
        parent.join()
        os._exit(1)


class EngineClient:
    """An engine's process, from `start` to `stop`. `launch`: starts it without waiting."""

    def __init__(self, setup: EngineSetup, launch: Callable[[EngineSetup], Child] = spawn) -> None:
        self.setup, self._launch = setup, launch
        self.number = next(ENGINE_NUMBERS)  # unlike its `id`, no other's later
        self.statistics = SpecDecodeStats()
        self.state: State = "loading"
        self.info: ModelInfo | None = None  # once it has been ready
        self.problem = ""  # why it failed
        self.running = self.waiting = self.restarts = 0
        self.preempted = 0  # of all engines
        self._preempted = 0  # of this one
        self._ids = count()
        self._listeners: dict[int, Listener] = {}  # of requests and questions
        self._prompt_tokens: dict[int, int] = {}  # of accepted requests
        self._stuck: set[int] = set()  # requests that have waited since the last step
        self._stuck_s = 0.0  # for so long
        self._process: Process | None = None
        self._deaths = 0  # since it was ready last
        self._idle = asyncio.Event()
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self.on_failure = lambda: None  # called if no engine can be started

    @property
    def num_open(self) -> int:
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
        self._process, pipe = self._launch(self.setup)
        self._outgoing.put(None)  # the end of the former writer
        self._outgoing = SimpleQueue()
        Thread(target=self._read, args=(pipe,), name="events", daemon=True).start()
        args = pipe, self._outgoing
        Thread(target=self._write, args=args, name="outgoing", daemon=True).start()
        self._watch(self._process)

    async def stop(self, drain_seconds: float) -> None:
        """Take no new requests; those that run have `drain_seconds` seconds to end."""
        if self.state in ("draining", "stopped"):
            return
        listens, self.state = self.state == "ready", "draining"
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), drain_seconds)
        except TimeoutError:
            log.warning("%s requests of %s are cut off", len(self._listeners), self._target)
            self._fail("the server is shutting down; send the request to another, or later")
        self.state = "stopped"
        self._send(Stop())
        if self._process is not None:
            if listens:  # one that is loading does not
                await asyncio.to_thread(self._process.join, 5)
            self._process.kill()

    def submit(self, request: AnyRequest, listener: Listener) -> Callable[[], None]:
        """Send a request, and call `listener` with its notifications: `Accepted` and the output of
        each step, or `TranscriptDelta`s and a `Reply`; or RefusedRequest. Return a function that
        ends the request early, which frees its row within a step. Raises UnavailableError."""
        self._require_ready()
        id = self._add_listener(listener)
        self._send(Add(id, request))
        return partial(self._abort, id)

    async def ask(self, name: Query, **arguments: Any) -> Any:
        """Return the answer to a question that takes no step. Raises RefusedRequest and
        UnavailableError."""
        self._require_ready()
        answers: asyncio.Queue[Any] = asyncio.Queue()
        id = self._add_listener(answers.put_nowait)
        try:
            self._send(Ask(id, name, arguments))
            answer = await answers.get()
        finally:
            self._remove_listener(id)
        if isinstance(answer, Exception):
            raise answer
        return answer.value

    def _abort(self, id: int) -> None:
        if id in self._listeners:
            self._remove_listener(id)
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

    def _add_listener(self, listener: Listener) -> int:
        id = next(self._ids)
        self._listeners[id] = listener
        self._idle.clear()
        return id

    def _remove_listener(self, id: int) -> None:
        self._listeners.pop(id, None)
        self._prompt_tokens.pop(id, None)
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
            self._deliver(Refusal(id, "input", problem, _find_deepest_argument(message)))

    @staticmethod
    def _write(pipe: Pipe, outgoing: SimpleQueue[Any]) -> None:
        """Writer thread: sends queued messages."""
        while (message := outgoing.get()) is not None:
            try:
                pipe.send_bytes(message)
            except (OSError, ValueError):  # it has died, which `_read` sees too
                return

    def _read(self, pipe: Pipe) -> None:
        """Reader thread: hands the engine's messages to the event loop."""
        while True:
            try:
                message: FromEngine | None = pipe.recv()
            except Exception as error:
                if not isinstance(error, EOFError | OSError):
                    log.exception("a message of the engine cannot be read")
                message = None
            try:
                self._loop.call_soon_threadsafe(self._handle, message)
            except RuntimeError:  # the loop is closed
                return
            if message is None:
                return

    def _handle(self, message: FromEngine | None) -> None:
        match message:
            case StepOutputs(parts, running, waiting, preempted):
                self.running, self.waiting = running, waiting
                self.preempted += preempted - self._preempted
                self._preempted = preempted
                self._stuck.clear()
                for part in parts:
                    self._deliver(part)
            case TranscriptDelta():
                self._stuck.clear()
                self._deliver(message)
            case Accepted() | Reply() | Refusal():
                self._deliver(message)
            case ModelInfo():
                self.info, self._deaths = message, 0
                self.setup = replace(self.setup, adapters=())  # they run when it starts again
                log.info("%s is ready, on %s", message.target, message.runtime)
                if self.state in ("loading", "restarting"):
                    self.state = "ready"
            case LoadFailed(problem):
                self.state, self.problem = "failed", problem
                self.on_failure()
            case None:
                self._handle_exit()

    def _deliver(self, message: Accepted | TranscriptDelta | Reply | Refusal | StepOutput) -> None:
        listener = self._listeners.get(message.id)
        if listener is None:  # its client has left
            return
        match message:
            case Accepted(id, prompt_tokens):
                self._prompt_tokens[id] = prompt_tokens
            case TranscriptDelta() | StepOutput(done=None):
                pass
            case _:
                self._remove_listener(message.id)
        listener(RefusedRequest(message) if isinstance(message, Refusal) else message)

    def _watch(self, process: Process) -> None:
        """Kill an engine that takes no step while requests wait. Seconds are counted, as clocks
        jump after a suspension."""
        if process is not self._process:
            return
        self._loop.call_later(CHECK_INTERVAL_S, self._watch, process)
        self._stuck &= self._listeners.keys()
        if not self._stuck:
            self._stuck, self._stuck_s = set(self._listeners), 0.0
            return
        self._stuck_s += CHECK_INTERVAL_S
        prefill_s = PREFILL_S_PER_TOKEN * sum(self._prompt_tokens.values())
        if self._stuck_s > STALL_TIMEOUT_S + prefill_s:
            problem = "the engine of %s has taken no step for %.0f s; it is ended"
            log.error(problem, self._target, self._stuck_s)
            self._stuck.clear()
            process.kill()

    def _fail(self, reason: str) -> None:
        for id in list(self._listeners):
            self._deliver(Refusal(id, "dead", reason))

    def _handle_exit(self) -> None:
        """Fail the requests of a process that has died, and start another one."""
        if self._process is not None:
            self._process.kill()  # one that only closed its pipe
        self.running = self.waiting = self._preempted = 0
        if self.state not in ("failed", "stopped", "draining"):
            self.state = "restarting"
            delay = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S) - 1)]
            self._deaths += 1
            self.restarts += 1
            log.error("the engine of %s ended; it is started again in %s s", self._target, delay)
            self._loop.call_later(delay, self._restart)
        self._fail("the engine stopped while it wrote this text; send the request again")

    def _restart(self) -> None:
        if self.state == "restarting":
            self.start()


def _find_deepest_argument(message: ToEngine) -> str | None:
    """Return the argument that is nested too deeply to be sent."""
    arguments: dict[str, Any] = getattr(message, "arguments", {})
    if isinstance(message, Add) and isinstance(request := message.request, GenerateRequest):
        request_fields = {each.name: getattr(request, each.name) for each in fields(request)}
        arguments = {**request.controls, **request_fields}
    for name, value in arguments.items():
        try:
            ForkingPickler.dumps(value)
        except RecursionError:
            return name
    return None
