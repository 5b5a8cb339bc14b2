"""Client of an engine's process, for the HTTP process. The client starts the engine's process,
sends requests over a pipe and receives outputs. If the engine's process dies, its requests fail and
the client starts a new process."""

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
RESTART_DELAYS_S = (1.0, 2.0, 5.0, 10.0, 30.0)  # after 1, 2, ... deaths since the engine was ready
CHECK_INTERVAL_S = 1.0  # between two checks of an engine
# An engine is killed if it takes no step for this long while requests wait. A step may take tens of
# seconds on a slow machine
STALL_TIMEOUT_S = 300.0
PREFILL_S_PER_TOKEN = 0.1  # added for each prompt token, as one step may prefill all prompts
# Threads that prepare requests let the engine's thread run after this time
SWITCH_INTERVAL_S = 0.0005
ENGINE_NUMBERS = count()
log = logging.getLogger(__name__)


class RefusedRequest(Exception):
    """The engine refused a request or query, or failed before the request or query was finished."""

    def __init__(self, refusal: Refusal) -> None:
        super().__init__(refusal.message)
        self.kind, self.message, self.option = refusal.kind, refusal.message, refusal.option


class UnavailableError(Exception):
    """No engine accepts requests now. `retry_after`: seconds until a retry is worthwhile."""

    def __init__(self, message: str, retry_after: int) -> None:
        super().__init__(message)
        self.message, self.retry_after = message, retry_after


Notification = Accepted | StepOutput | TranscriptDelta | Reply | RefusedRequest | UnavailableError
Listener = Callable[[Notification], None]


class Pipe(Protocol):
    """The methods of multiprocessing's `Connection` that EngineClient uses. The methods raise
    EOFError or OSError once the other end is closed."""

    def recv(self) -> Any: ...

    def send_bytes(self, buf: Any, /) -> None: ...


class Process(Protocol):
    """The methods of multiprocessing's process that EngineClient uses. The process ends when its
    engine ends; `kill` also closes the process's end of the pipe."""

    def join(self, timeout: float) -> None: ...

    def kill(self) -> None: ...


class Child(NamedTuple):
    """An engine's process, loading or running, and the pipe to it."""

    process: Process
    pipe: Pipe


def spawn(setup: EngineSetup) -> Child:
    """Start an engine in a new process, which ends when this process ends."""
    context = get_context("spawn")  # a fork would copy locks that other threads hold
    own_end, child_end = context.Pipe()
    process = context.Process(
        target=run_engine_process, args=(child_end, setup), name="foretoken engine", daemon=True
    )
    process.start()
    child_end.close()
    return Child(process, own_end)


def run_engine_process(pipe: Connection, setup: EngineSetup) -> None:
    """Run an engine: the main function of the engine's process. `pipe` leads to the HTTP
    process."""
    # A terminal sends these signals to both processes, but the HTTP process ends the engine's
    for name in (signal.SIGINT, signal.SIGTERM):
        signal.signal(name, signal.SIG_IGN)
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    setup.log_options.configure()
    Thread(target=_exit_with_parent, args=(parent_process(),), name="end", daemon=True).start()
    from foretoken.server.process.startup import serve  # here, as it imports torch

    serve(pipe, setup)


def _exit_with_parent(parent: BaseProcess | None) -> None:
    """End this process when its parent ends. While models load or a step hangs, the process would
    not notice a closed pipe."""
    if parent is not None:
        parent.join()
        os._exit(1)


class EngineClient:
    """Client of one engine's process; `start` starts the process and `stop` ends it. `launch`
    creates the process, without waiting until its engine is ready."""

    def __init__(self, setup: EngineSetup, launch: Callable[[EngineSetup], Child] = spawn) -> None:
        self.setup, self._launch = setup, launch
        self.number = next(ENGINE_NUMBERS)  # unlike `id(self)`, never reused
        self.statistics = SpecDecodeStats()
        self.state: State = "loading"
        self.info: ModelInfo | None = None  # set when the engine is ready for the first time
        self.problem = ""  # why the models could not be loaded, if `state` is "failed"
        self.running = self.waiting = self.restarts = 0
        self.preempted = 0  # preemptions in all processes that this client has started
        self._preempted = 0  # preemptions in the current process
        self._ids = count()
        self._listeners: dict[int, Listener] = {}  # of requests and queries, by id
        self._prompt_tokens: dict[int, int] = {}  # of accepted requests, by id
        self._stuck: set[int] = set()  # requests that have waited since the last step
        self._stuck_s = 0.0  # seconds that these requests have waited
        self._process: Process | None = None
        self._deaths = 0  # deaths of processes since an engine was last ready
        self._idle = asyncio.Event()
        self._outgoing: SimpleQueue[Any] = SimpleQueue()
        self.on_failure = lambda: None  # called if the models cannot be loaded

    @property
    def num_open(self) -> int:
        """Return the number of unfinished requests and queries."""
        return len(self._listeners)

    @property
    def states(self) -> dict[str, int]:
        """Return the number of engines in each state, like `EngineFleet.states`."""
        return {self.state: 1}

    @property
    def _target(self) -> str:
        return "a model" if self.info is None else self.info.target

    def start(self) -> None:
        """Start the engine's process. `state` becomes "ready" once its models are loaded."""
        self._loop = asyncio.get_running_loop()
        self._process, pipe = self._launch(self.setup)
        self._outgoing.put(None)  # ends the former writer thread
        self._outgoing = SimpleQueue()
        Thread(target=self._forward_messages, args=(pipe,), name="events", daemon=True).start()
        args = pipe, self._outgoing
        Thread(target=self._write, args=args, name="outgoing", daemon=True).start()
        self._watch(self._process)

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, give running requests `drain_seconds` to finish, abort unfinished
        requests, and end the engine's process."""
        if self.state in ("draining", "stopped"):
            return
        listens, self.state = self.state == "ready", "draining"
        self._note_idle()
        try:
            await asyncio.wait_for(self._idle.wait(), drain_seconds)
        except TimeoutError:
            log.warning("%s requests to %s are aborted", len(self._listeners), self._target)
            self._fail("the server is shutting down; send the request again later")
        self.state = "stopped"
        self._send(Stop())
        if self._process is not None:
            if listens:  # while loading, the process does not receive `Stop`
                await asyncio.to_thread(self._process.join, 5)
            self._process.kill()

    def submit(self, request: AnyRequest, listener: Listener) -> Callable[[], None]:
        """Send a request to the engine and return a function that aborts it.

        `listener` is called on the event loop with each notification about the request: for a
        GenerateRequest `Accepted`, then the `StepOutput` of each step; for a transcription
        `TranscriptDelta`s, then a `Reply`. If the request fails, the last notification is a
        RefusedRequest. Raises UnavailableError if the engine is not ready.
        """
        self._require_ready()
        id = self._add_listener(listener)
        self._send(Add(id, request))
        return partial(self._abort, id)

    async def ask(self, name: Query, **arguments: Any) -> Any:
        """Send a query, which needs no step of the engine, and return its answer. Raises
        RefusedRequest if the query fails, UnavailableError if the engine is not ready."""
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
            "restarting": "the engine is restarting",
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
        """Queue a message for the writer thread: sending here would block the event loop while the
        pipe is full."""
        try:
            self._outgoing.put(ForkingPickler.dumps(message))
        except RecursionError:
            problem = "the request is nested too deeply; flatten it"
            id = getattr(message, "id", -1)
            self._deliver(Refusal(id, "input", problem, _find_deepest_argument(message)))

    @staticmethod
    def _write(pipe: Pipe, outgoing: SimpleQueue[Any]) -> None:
        """Send queued messages to the engine, in the writer thread."""
        while (message := outgoing.get()) is not None:
            try:
                pipe.send_bytes(message)
            except (OSError, ValueError):  # the process has died; `_forward_messages` handles it
                return

    def _forward_messages(self, pipe: Pipe) -> None:
        """In the reader thread, pass each message of the engine to `_handle` on the event loop;
        pass None once the pipe is closed."""
        while True:
            try:
                message: FromEngine | None = pipe.recv()
            except Exception as error:
                if not isinstance(error, EOFError | OSError):
                    log.exception("a message of the engine cannot be unpickled")
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
                self.setup = replace(self.setup, adapters=())  # checked; not needed on a restart
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
        if listener is None:  # the client has disconnected
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
        """Kill the engine if it takes no step for too long while requests wait. Called every
        CHECK_INTERVAL_S; time is counted in calls, as clocks jump after the machine was
        suspended."""
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
            problem = "the engine of %s has taken no step for %.0f s; it is killed"
            log.error(problem, self._target, self._stuck_s)
            self._stuck.clear()
            process.kill()

    def _fail(self, reason: str) -> None:
        for id in list(self._listeners):
            self._deliver(Refusal(id, "dead", reason))

    def _handle_exit(self) -> None:
        """Fail the requests of the process, which has ended. Start a new process unless the models
        could not be loaded or the client was stopped."""
        if self._process is not None:
            self._process.kill()  # the process may only have closed its pipe
        self.running = self.waiting = self._preempted = 0
        if self.state not in ("failed", "stopped", "draining"):
            self.state = "restarting"
            delay = RESTART_DELAYS_S[min(self._deaths, len(RESTART_DELAYS_S) - 1)]
            self._deaths += 1
            self.restarts += 1
            log.error("the engine of %s ended; it is restarted in %s s", self._target, delay)
            self._loop.call_later(delay, self._restart)
        self._fail("the engine stopped during this request; send the request again")

    def _restart(self) -> None:
        if self.state == "restarting":
            self.start()


def _find_deepest_argument(message: ToEngine) -> str | None:
    """Return the name of an argument of the request or query that is nested too deeply to be
    pickled; None if there is no such argument."""
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
