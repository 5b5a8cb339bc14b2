"""Several engines as one: who takes a request, what becomes of it when its engine dies, and what
all of them come to. Where an engine runs is not known here.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from collections import Counter, OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from foretoken.records import Begun, StepRecord
from foretoken.server.process.client import (
    Child,
    EngineClient,
    RefusedRequest,
    State,
    Told,
    UnavailableError,
)
from foretoken.server.process.messages import (
    Accepted,
    GenerateRequest,
    ModelInfo,
    StepOutput,
    TranscribeRequest,
    is_chat,
)
from foretoken.server.process.statistics import SpecDecodeStats
from foretoken.server.process.worker import Setup
from foretoken.text.chat import MEDIA, parts_of

MOVES = 3  # engines that a text may lose: one that ends them itself is not to end all
WAIT = 300.0  # seconds that a text waits for an engine, where all are being started again
TICK = 0.05  # seconds between two looks for one
SHARE = 0.5  # of a prompt: an engine that has read as much is preferred
SLACK = 4  # texts that it may then write more than the one with fewest
CHARACTERS, IDS = 64, 16  # of a prompt that one digest more stands for
KEPT_DIGESTS = 2**17  # digests: prompts of 8 million characters
log = logging.getLogger(__name__)


def digests(request: GenerateRequest) -> list[int]:
    """Return digests of the prompt's beginnings, the shortest first: of a text, of ids, or of
    messages in which every turn extends the last. Other salts and templates have others."""
    prompt, size = request.prompt, CHARACTERS
    if is_chat(prompt):
        prompt = "".join(f"{turn.get('role')}\0{_said(turn)}\0" for turn in prompt)
    elif isinstance(prompt, list):
        size = IDS
    about = request.cache_salt, request.chat_template
    running, hashes = hashlib.blake2b(repr(about).encode(), digest_size=8), list[int]()
    for start in range(0, len(prompt) - size + 1, size):
        running.update(repr(prompt[start : start + size]).encode(errors="surrogatepass"))
        hashes.append(int.from_bytes(running.digest()))
    return hashes


def _said(message: dict[str, Any]) -> str:
    """A message's content, with a digest for each picture and sound."""

    def said(part: Mapping[str, Any]) -> str:
        if part["type"] not in MEDIA:
            return part["text"]
        return hashlib.blake2b(part[part["type"]], digest_size=CHARACTERS // 2).hexdigest()

    return "".join(map(said, parts_of(message))) or str(message.get("content"))


class EngineFleet:
    """`count` engines behind one client's face. The first is started alone: what steps cost is
    measured there, undisturbed, and the others are given it."""

    def __init__(self, setup: Setup, begin: Callable[[Setup], Child], count: int) -> None:
        self.problem = ""  # why it failed
        self.failed = lambda: None  # called where one of the first engines cannot be started
        self._begin = begin
        self._clients = [EngineClient(setup, begin) for _ in range(count)]
        for client in self._clients:
            client.failed = partial(self._fail, client)
        self.statistics = SpecDecodeStats()
        # Digests of beginnings, by who has read them; what was asked for longest ago comes first
        self._read: OrderedDict[tuple[Hashable, int], None] = OrderedDict()
        self._measured = False  # whether the first has been ready
        self._left: dict[EngineClient, asyncio.Task[None]] = {}  # which take no more texts
        self._past = Counter[str]()  # sums of those that have ended
        self._end: State | None = None

    def start(self) -> None:
        """Start the engines; one of them is ready when `state` says so."""
        self._clients[0].start()
        self._starting = asyncio.create_task(self._rest())

    async def stop(self, patience: float) -> None:
        """No new requests; those that run may end within so many seconds."""
        if self._end is not None:
            return
        self._end = "draining"
        self._starting.cancel()
        ends = [client.stop(patience) for client in self._clients]
        results = await asyncio.gather(*ends, *self._left.values(), return_exceptions=True)
        for error in results[: len(ends)]:
            if error is not None:
                log.error("an engine did not end in order", exc_info=error)
        self._end = "stopped"

    def scale(self, count: int, patience: float) -> None:
        """Run `count` engines from now on. Surplus engines take no more texts and end with those
        they have; texts that remain after `patience` seconds go on elsewhere."""
        assert count > 0
        if self.ending:
            return
        while len(self._clients) < count:
            self._clients.append(client := EngineClient(self._clients[0].setup, self._begin))
            if self._measured:
                client.start()
        while len(self._clients) > count:
            client = min(
                reversed(self._clients), key=lambda client: (client.state == "ready", client.open)
            )
            self._clients.remove(client)
            end = self._left[client] = asyncio.create_task(client.stop(patience))
            end.add_done_callback(partial(self._forget, client))

    def _forget(self, client: EngineClient, end: asyncio.Task[None]) -> None:
        """Keep no more than the sums of one that has left."""
        del self._left[client]
        self._past.update(preempted=client.preempted, restarts=client.restarts)
        if not end.cancelled() and (error := end.exception()) is not None:
            log.error("an engine did not end in order", exc_info=error)

    @property
    def state(self) -> State:
        if self._end is not None:
            return self._end
        if self.problem:
            return "failed"
        states = {client.state for client in self._clients}
        best: tuple[State, ...] = ("ready", "loading", "restarting", "failed")
        return next(state for state in best if state in states or state == "failed")

    @property
    def states(self) -> dict[str, int]:
        """The number of engines in each state."""
        return dict(Counter(client.state for client in [*self._clients, *self._left]))

    @property
    def info(self) -> ModelInfo | None:
        ready = [client.info for client in self._clients if client.state == "ready"]
        return ready[0] if ready else self._clients[0].info

    @property
    def running(self) -> int:
        return self._sum("running")

    @property
    def waiting(self) -> int:
        return self._sum("waiting")

    @property
    def preempted(self) -> int:
        return self._sum("preempted")

    @property
    def restarts(self) -> int:
        return self._sum("restarts")

    def submit(
        self, request: GenerateRequest, listener: Callable[[Told], None]
    ) -> Callable[[], None]:
        """Run a request like `EngineClient.submit`; if the engine dies, the request resumes on
        another one."""
        text = MovableText(self, request, listener)
        text.begin(self.ready_client(request))
        return text.end

    def transcribe(
        self, request: TranscribeRequest, listener: Callable[[Told], None]
    ) -> Callable[[], None]:
        """Have a sound written down like `EngineClient.transcribe`, by one engine."""
        return self.ready_client(GenerateRequest("")).transcribe(request, listener)

    async def ask(self, name: str, **arguments: Any) -> Any:
        """Return an answer that takes no step, and that any engine gives."""
        return await self.ready_client(GenerateRequest("")).ask(name, **arguments)

    def ready_client(self, request: GenerateRequest) -> EngineClient:
        """Return the engine for a request, which is noted to read it. Raises UnavailableError."""
        ready = [client for client in self._clients if client.state == "ready"]
        if not ready or self.state != "ready":
            problem = f": {self.problem}" if self.problem else ""
            raise UnavailableError(f"no engine is ready ({self.state}){problem}", 2)
        prefix = digests(request)
        client = self._nearest(ready, prefix)
        for digest in prefix:
            self._read[_name(client), digest] = None
            self._read.move_to_end((_name(client), digest))
        while len(self._read) > KEPT_DIGESTS:
            self._read.popitem(last=False)
        return client

    async def next_client(self, request: GenerateRequest) -> EngineClient:
        """Return a client as `ready_client` does, once one is ready: engines that died are being
        started again."""
        for _ in range(int(WAIT / TICK)):
            if self.state not in ("loading", "restarting"):
                break
            await asyncio.sleep(TICK)
        return self.ready_client(request)

    @property
    def ending(self) -> bool:
        """True where no text goes on elsewhere any more."""
        return self._end is not None

    def _nearest(self, ready: list[EngineClient], prefix: list[int]) -> EngineClient:
        """Where most of a prompt has been read, if that is much of it and others have not far less
        to do; else where there is least to do."""

        def read(client: EngineClient) -> int:
            unread = (i for i, d in enumerate(prefix) if (_name(client), d) not in self._read)
            return next(unread, len(prefix))

        least = min(ready, key=lambda client: client.open)
        near = [client for client in ready if client.open <= least.open + SLACK]
        best = max(near, key=lambda client: (read(client), -client.open))
        return best if read(best) > SHARE * len(prefix) else least

    async def _rest(self) -> None:
        """Start the others once the first is ready."""
        first = self._clients[0]
        while first.state in ("loading", "restarting"):
            await asyncio.sleep(TICK)
        if first.state != "ready":  # it cannot be started, nor could they
            return
        self._measured = True
        for client in self._clients:  # the first too, for when it is started again
            client.setup = replace(client.setup, costs=first.info and first.info.costs)
        for client in self._clients[1:]:
            client.start()
        while any(client.state == "loading" for client in self._clients):
            await asyncio.sleep(TICK)
        for client in self._clients:
            client.failed = lambda: None  # from now on the others go on without it

    def _fail(self, client: EngineClient) -> None:
        self.problem = client.problem
        self.failed()

    def _sum(self, name: str) -> int:
        there = sum(getattr(client, name) for client in [*self._clients, *self._left])
        return there + self._past[name]


class MovableText:
    """A request to a fleet: where its engine dies, another one goes on with the text."""

    def __init__(
        self, fleet: EngineFleet, request: GenerateRequest, listener: Callable[[Told], None]
    ) -> None:
        self.fleet, self.request, self.listener = fleet, request, listener
        self.accepted, self.moves = False, MOVES
        self.steps: list[StepRecord] = []
        self._moving: asyncio.Task[None] | None = None

    def begin(self, client: EngineClient) -> None:
        """Send it to an engine, with what another one has written."""
        begun = Begun(self.steps) if self.steps else None
        self._abort = client.submit(replace(self.request, begun=begun), self._hear)

    def end(self) -> None:
        """End it early, wherever it is."""
        self._abort()
        if self._moving is not None:
            self._moving.cancel()

    def _hear(self, message: Told) -> None:
        match message:
            case RefusedRequest(kind="dead") if self.moves and not self.fleet.ending:
                log.warning("a text of %s steps goes on in another engine", len(self.steps))
                self.moves -= 1
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
        fleet = self.fleet
        try:
            client = (
                await fleet.next_client(self.request)
                if self.accepted
                else fleet.ready_client(self.request)
            )
        except UnavailableError as error:
            self.listener(error)
        else:
            self.begin(client)


def _name(client: EngineClient) -> tuple[int, int]:
    """An engine by what it has read: one that was started again has read nothing."""
    return client.number, client.restarts


Engines = EngineClient | EngineFleet
