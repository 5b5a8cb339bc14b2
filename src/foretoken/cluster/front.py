"""The server's application under Ray Serve, before replicas that it places itself."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from time import sleep
from typing import Any

from fastapi import FastAPI
from ray import serve

from foretoken.cluster import session
from foretoken.cluster.replica import placed
from foretoken.errors import InputError
from foretoken.server.app import make
from foretoken.server.options import ServerOptions
from foretoken.server.process.fleet import EngineFleet
from foretoken.server.process.worker import Setup
from foretoken.server.run import listening

NAME = "foretoken"
REQUESTS = 100_000  # at a time: the server's own limits are told to clients, Serve's are not
LATE = 15.0  # seconds beyond the patience, until Serve ends what does not end itself
LOOK = 0.5  # seconds between two looks at a server
log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Replicas:
    """How many engines, and the threads of each."""

    count: int
    threads: int


def application(setup: Setup, options: ServerOptions, replicas: Replicas) -> serve.Application:
    """What Serve runs: one process takes the requests, and its replicas write the texts."""

    def app() -> FastAPI:
        setup.logs.begin()
        fleet = EngineFleet(setup, partial(placed, threads=replicas.threads), replicas.count)
        server = make(fleet, options)
        server.state.fleet = fleet
        return server

    @serve.deployment(
        name="front",
        num_replicas=1,  # which knows all texts and who has read what
        max_ongoing_requests=REQUESTS,
        graceful_shutdown_timeout_s=options.drain + LATE,
        ray_actor_options={"num_cpus": 0},
    )
    @serve.ingress(app)
    class Front:
        def problem(self) -> str:
            """Why there will be no server; "" where there may be."""
            return self._fleet.problem

        async def scale(self, count: int) -> None:
            """So many replicas from now on; those that are too many end with their texts."""
            if count < 1:
                raise InputError(f"count is {count}; give a whole number from 1")
            self._fleet.scale(count, options.drain)

        async def drain(self) -> None:
            """No new requests; until those that run have ended."""
            await self._fleet.stop(options.drain)

        @property
        def _fleet(self) -> EngineFleet:
            deployment: Any = self
            return deployment.app.state.fleet

    return Front.bind()


def run(
    setup: Setup,
    options: ServerOptions,
    *,
    replicas: int,
    threads: int | None,
    address: str,
) -> None:
    """Serve until SIGTERM or Ctrl-C, as `server.run` does, by so many replicas of so many threads
    (None: the processors shared out) of the Ray at `address`. InputError as there, and for what
    Ray cannot give."""
    setup.logs.begin()
    with listening(options.host, options.port) as listener:
        port = listener.getsockname()[1]
    session.join(address)
    try:
        each = session.threads(replicas, threads)
        kv = setup.engine.get("kv_memory") or 0
        session.require_memory(replicas, session.weights(setup.target, setup.draft), kv)
        app = application(setup, options, Replicas(replicas, each))
        with served(app, options.host, port) as front:
            log.info(
                "http://%s:%s loads %s on %s replicas",
                options.host,
                port,
                options.name,
                replicas,
            )
            try:
                while not (problem := front.problem.remote().result(timeout_s=60)):
                    sleep(LOOK)
                raise InputError(problem)
            except KeyboardInterrupt:
                front.drain.remote().result(timeout_s=options.drain + LATE)
    finally:
        session.leave()


@contextmanager
def served(app: serve.Application, host: str, port: int) -> Iterator[Any]:
    """The application at an address, and a handle to it; at the end all of it is gone."""
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": host, "port": port},
        logging_config=quiet,
    )
    try:
        yield serve.run(app, name=NAME, route_prefix="/", logging_config=quiet)
    finally:
        serve.shutdown()
