"""Several engines, on any machines. `EngineFleet` is a set of replicas with the interface of one
engine: if a replica dies, its requests continue on another replica. `ServedModels` maps each served
model name to its engine.

Each served model other than the base model is the base model with an adapter merged in. The engines
of served models share nothing.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import psutil

from foretoken.records import PartialOutput, StepRecord
from foretoken.server.process.client import (
    Child,
    EngineClient,
    Listener,
    Notification,
    RefusedRequest,
    State,
    UnavailableError,
)
from foretoken.server.process.messages import (
    Accepted,
    AnyRequest,
    EngineSetup,
    GenerateRequest,
    ModelInfo,
    Query,
    StepOutput,
    is_chat,
)
from foretoken.server.process.statistics import SpecDecodeStats
from foretoken.text.messages import MEDIA_PART_KEYS, get_parts

# Times that a request may move to another engine: a request that kills engines must not kill all
MAX_MOVES = 3
ENGINE_TIMEOUT_S = 300.0  # how long a request waits for an engine while all engines restart
POLL_INTERVAL_S = 0.05  # between two checks of an engine that starts
# An engine that has prefilled more than this share of a prompt is preferred, unless it has more
# than MAX_IMBALANCE requests more than the least busy engine
MIN_PREFIX_SHARE = 0.5
MAX_IMBALANCE = 4
DIGEST_CHARACTERS, DIGEST_IDS = 64, 16  # length of the pieces of a prompt that are digested
MAX_DIGESTS = 2**17  # of stored digests, enough for prompts of 8 million characters in all
STATES_WORST_FIRST: tuple[State, ...] = (
    "failed",
    "restarting",
    "loading",
    "draining",
    "stopped",
    "ready",
)
log = logging.getLogger(__name__)


def compute_prefix_digests(request: GenerateRequest) -> list[int]:
    """Return digests of the prefixes of a request's prompt, the shortest prefix first: one for
    every DIGEST_CHARACTERS characters or DIGEST_IDS ids. Two requests share a digest only if they
    share the prefix, the cache salt and the chat template; so requests of one conversation share
    the digests of its earlier turns."""
    prompt, size = request.prompt, DIGEST_CHARACTERS
    if is_chat(prompt):
        prompt = "".join(f"{turn.get('role')}\0{_flatten_content(turn)}\0" for turn in prompt)
    elif isinstance(prompt, list):
        size = DIGEST_IDS
    context = request.cache_salt, request.chat_template
    running, hashes = hashlib.blake2b(repr(context).encode(), digest_size=8), list[int]()
    for start in range(0, len(prompt) - size + 1, size):
        running.update(repr(prompt[start : start + size]).encode(errors="surrogatepass"))
        hashes.append(int.from_bytes(running.digest()))
    return hashes


def _flatten_content(message: dict[str, Any]) -> str:
    """Return a message's content as a string, with a digest for each image and audio."""

    def describe(part: Mapping[str, Any]) -> str:
        if part["type"] not in MEDIA_PART_KEYS:
            return part["text"]
        return hashlib.blake2b(part[part["type"]], digest_size=DIGEST_CHARACTERS // 2).hexdigest()

    return "".join(map(describe, get_parts(message))) or str(message.get("content"))


def _sum_property(name: str) -> Any:
    """Return a property of EngineFleet: the sum of an attribute over current and ended engines."""

    def add(fleet: EngineFleet) -> int:
        return sum(getattr(each, name) for each in fleet.engines) + fleet.ended_totals[name]

    return property(add)


class EngineFleet:
    """A set of `count` replicas of an engine with the interface of one EngineClient. The first
    replica starts alone, so that nothing disturbs its measurement of the costs of steps; the other
    replicas use the measured costs."""

    def __init__(
        self, setup: EngineSetup, launch: Callable[[EngineSetup], Child], count: int
    ) -> None:
        self.problem = ""  # why the models could not be loaded, if `state` is "failed"
        self.on_failure = lambda: None  # called if one of the first engines cannot load the models
        self._launch = launch
        self._clients = [EngineClient(setup, launch) for _ in range(count)]
        for client in self._clients:
            client.on_failure = partial(self._fail, client)
        self.statistics = SpecDecodeStats()
        # (engine, digest of a prefix that the engine has prefilled), the least recently used first
        self._prefilled: OrderedDict[tuple[Hashable, int], None] = OrderedDict()
        self._measured = False  # whether the first engine has been ready, with its costs measured
        self._leaving: dict[EngineClient, asyncio.Task[None]] = {}  # engines that are draining
        self.ended_totals = Counter[str]()  # sums over engines that have ended
        self._end_state: State | None = None

    running: int = _sum_property("running")
    waiting: int = _sum_property("waiting")
    preempted: int = _sum_property("preempted")
    restarts: int = _sum_property("restarts")

    @property
    def engines(self) -> list[EngineClient]:
        """Return all engines, including those that are draining."""
        return [*self._clients, *self._leaving]

    def start(self) -> None:
        """Start the engines. `state` becomes "ready" as soon as one engine is ready."""
        self._clients[0].start()
        self._starting = asyncio.create_task(self._start_others())

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, give running requests `drain_seconds` to finish, abort unfinished
        requests, and end the engines."""
        if self._end_state is not None:
            return
        self._end_state = "draining"
        self._starting.cancel()
        ends = [client.stop(drain_seconds) for client in self._clients]
        results = await asyncio.gather(*ends, *self._leaving.values(), return_exceptions=True)
        for error in results[: len(ends)]:
            if error is not None:
                log.error("an engine did not stop cleanly", exc_info=error)
        self._end_state = "stopped"

    def scale(self, count: int, drain_seconds: float) -> None:
        """Change the number of engines to `count`. A surplus engine accepts no new requests. It
        ends when its requests are finished, at the latest after `drain_seconds`; unfinished
        requests then continue on other engines."""
        assert count > 0
        if self.is_ending:
            return
        while len(self._clients) < count:
            self._clients.append(client := EngineClient(self._clients[0].setup, self._launch))
            if self._measured:
                client.start()
        while len(self._clients) > count:
            client = min(
                reversed(self._clients),
                key=lambda client: (client.state == "ready", client.num_open),
            )
            self._clients.remove(client)
            end = self._leaving[client] = asyncio.create_task(client.stop(drain_seconds))
            end.add_done_callback(partial(self._forget, client))

    def _forget(self, client: EngineClient, end: asyncio.Task[None]) -> None:
        """Remove an engine that `scale` has stopped, and add its counts to the totals. `end`: the
        task that stopped the engine."""
        del self._leaving[client]
        self.ended_totals.update(preempted=client.preempted, restarts=client.restarts)
        if not end.cancelled() and (error := end.exception()) is not None:
            log.error("an engine did not stop cleanly", exc_info=error)

    @property
    def state(self) -> State:
        if self._end_state is not None:
            return self._end_state
        if self.problem:
            return "failed"
        states = {client.state for client in self._clients}
        best: tuple[State, ...] = ("ready", "loading", "restarting", "failed")
        return next(state for state in best if state in states or state == "failed")

    @property
    def states(self) -> dict[str, int]:
        """Return the number of engines in each state."""
        return dict(Counter(client.state for client in self.engines))

    @property
    def info(self) -> ModelInfo | None:
        ready = [client.info for client in self._clients if client.state == "ready"]
        return ready[0] if ready else self._clients[0].info

    def submit(self, request: AnyRequest, listener: Listener) -> Callable[[], None]:
        """Submit a request to one of the engines, like `EngineClient.submit`. If the engine dies, a
        GenerateRequest continues on another engine; a transcription fails."""
        if not isinstance(request, GenerateRequest):
            return self.get_ready_client().submit(request, listener)
        movable = MovableRequest(self, request, listener)
        movable.begin(self.get_ready_client(request))
        return movable.end

    async def ask(self, name: Query, **arguments: Any) -> Any:
        """Send a query to any ready engine and return its answer, like `EngineClient.ask`."""
        return await self.get_ready_client().ask(name, **arguments)

    def get_ready_client(self, request: GenerateRequest | None = None) -> EngineClient:
        """Return the best engine for a request, or for a query if `request` is None. Record that
        the engine prefills the request's prompt. Raises UnavailableError if no engine is ready."""
        ready = [client for client in self._clients if client.state == "ready"]
        if not ready or self.state != "ready":
            problem = f": {self.problem}" if self.problem else ""
            raise UnavailableError(f"no engine is ready ({self.state}){problem}", 2)
        prefix = [] if request is None else compute_prefix_digests(request)
        client = self._choose_client(ready, prefix)
        for digest in prefix:
            self._prefilled[_get_prefix_owner(client), digest] = None
            self._prefilled.move_to_end((_get_prefix_owner(client), digest))
        while len(self._prefilled) > MAX_DIGESTS:
            self._prefilled.popitem(last=False)
        return client

    async def wait_for_client(self, request: GenerateRequest) -> EngineClient:
        """Wait at most ENGINE_TIMEOUT_S until an engine is ready, and return the best engine for a
        request. Raises UnavailableError if no engine is ready then."""
        with suppress(TimeoutError):
            await asyncio.wait_for(wait_until_settled(self), ENGINE_TIMEOUT_S)
        return self.get_ready_client(request)

    @property
    def is_ending(self) -> bool:
        """Return whether the fleet is stopping or stopped; requests then no longer move to another
        engine."""
        return self._end_state is not None

    def _choose_client(self, ready: list[EngineClient], prefix: list[int]) -> EngineClient:
        """Return the engine that has prefilled the longest part of a prompt, of the engines that
        are not much busier than the least busy engine. If that part is at most MIN_PREFIX_SHARE of
        the prompt, return the least busy engine. `prefix`: digests of the prompt's prefixes."""

        def count_prefilled(client: EngineClient) -> int:
            new = (
                i
                for i, d in enumerate(prefix)
                if (_get_prefix_owner(client), d) not in self._prefilled
            )
            return next(new, len(prefix))

        least_busy = min(ready, key=lambda client: client.num_open)
        near = [
            client for client in ready if client.num_open <= least_busy.num_open + MAX_IMBALANCE
        ]
        best = max(near, key=lambda client: (count_prefilled(client), -client.num_open))
        return best if count_prefilled(best) > MIN_PREFIX_SHARE * len(prefix) else least_busy

    async def _start_others(self) -> None:
        """Start the other engines once the first engine is ready, with its measured costs."""
        first = self._clients[0]
        if await wait_until_settled(first) != "ready":  # the others could not start either
            return
        self._measured = True
        for client in self._clients:  # also the first, which then measures no costs after a restart
            client.setup = replace(client.setup, costs=first.info and first.info.costs)
        for client in self._clients[1:]:
            client.start()
        while any(client.state == "loading" for client in self._clients):
            await asyncio.sleep(POLL_INTERVAL_S)
        for client in self._clients:
            client.on_failure = lambda: None  # from now on, the fleet continues without it

    def _fail(self, client: EngineClient) -> None:
        self.problem = client.problem
        self.on_failure()


class MovableRequest:
    """A request that a fleet has submitted to one of its engines. If that engine dies, another
    engine continues the output, at most MAX_MOVES times."""

    def __init__(self, fleet: EngineFleet, request: GenerateRequest, listener: Listener) -> None:
        self.fleet, self.request, self.listener = fleet, request, listener
        self.accepted, self.moves_left = False, MAX_MOVES
        self.steps: list[StepRecord] = []
        self._moving: asyncio.Task[None] | None = None

    def begin(self, client: EngineClient) -> None:
        """Send the request to an engine, together with the output that earlier engines
        generated."""
        begun = PartialOutput(self.steps) if self.steps else None
        self._abort = client.submit(replace(self.request, begun=begun), self._handle)

    def end(self) -> None:
        """Abort the request, on whichever engine it runs."""
        self._abort()
        if self._moving is not None:
            self._moving.cancel()

    def _handle(self, message: Notification) -> None:
        match message:
            case RefusedRequest(kind="dead") if self.moves_left and not self.fleet.is_ending:
                log.warning("a request moves to another engine after %s steps", len(self.steps))
                self.moves_left -= 1
                self._moving = asyncio.create_task(self._move())
                return
            case Accepted() if self.accepted:
                return
            case StepOutput():
                self.steps += message.steps
            case _:
                pass
        self.accepted = self.accepted or isinstance(message, Accepted)
        self.listener(message)

    async def _move(self) -> None:
        try:
            if self.accepted:
                client = await self.fleet.wait_for_client(self.request)
            else:
                client = self.fleet.get_ready_client(self.request)
        except UnavailableError as error:
            self.listener(error)
        else:
            self.begin(client)


def _get_prefix_owner(client: EngineClient) -> tuple[int, int]:
    """Return a key for the cached prefixes of an engine. The key changes when the engine restarts,
    as the cache is lost then."""
    return client.number, client.restarts


AnyEngine = EngineClient | EngineFleet


async def wait_until_settled(engine: AnyEngine) -> State:
    """Wait until an engine neither loads nor restarts, and return its state."""
    while engine.state in ("loading", "restarting"):
        await asyncio.sleep(POLL_INTERVAL_S)
    return engine.state


class ServedModels:
    """The engine of each served model name, the base model first. The engines start one after
    another, so that they do not disturb each other's measurements of the costs of steps."""

    def __init__(self, engines: Mapping[str, AnyEngine]) -> None:
        self.engines = dict(engines)
        self.base = next(iter(self.engines))
        self.problem = ""  # why the server must end
        self.on_failure = lambda: None  # called when the server must end
        self._complete = False  # whether all engines have been ready
        self._starting: asyncio.Task[None] | None = None
        for name, engine in self.engines.items():
            engine.on_failure = partial(self._fail, name)

    def start(self) -> None:
        """Start the engines. `state` becomes "ready" once all engines are ready."""
        self.engines[self.base].start()
        self._starting = asyncio.create_task(self._start_others())

    async def stop(self, drain_seconds: float) -> None:
        """Refuse new requests, give running requests `drain_seconds` to finish, abort unfinished
        requests, and end the engines."""
        if self._starting is not None:
            self._starting.cancel()
        await asyncio.gather(*(engine.stop(drain_seconds) for engine in self.engines.values()))

    @property
    def state(self) -> State:
        """Return the worst of the engines' states, in the order of STATES_WORST_FIRST."""
        states = {engine.state for engine in self.engines.values()}
        return next(state for state in STATES_WORST_FIRST if state in states)

    @property
    def states(self) -> dict[str, int]:
        """Return the number of engines in each state."""
        return dict(sum((Counter(each.states) for each in self.engines.values()), Counter[str]()))

    async def _start_others(self) -> None:
        """Start the engines of the other models one after another: each starts once the engine
        before it is ready."""
        for name, engine in self.engines.items():
            if name != self.base:
                engine.start()
            if await wait_until_settled(engine) == "failed":
                return
            if name == self.base:
                self._log_size()
        self._complete = True

    def _log_size(self) -> None:
        info, others = self.engines[self.base].info, len(self.engines) - 1
        if info is None or not others:
            return
        with suppress(psutil.Error):  # if the engine has just died
            size = psutil.Process(info.pid).memory_info().rss / 1e9
            log.info(
                "%s uses %.1f GB; %s more models will each use as much", self.base, size, others
            )

    def _fail(self, name: str) -> None:
        """Handle an engine that cannot load its model: end the server if not all engines have been
        ready yet, or if all engines have failed."""
        if self._complete and any(each.state != "failed" for each in self.engines.values()):
            return
        self.problem = self.engines[name].problem
        self.on_failure()
