"""The server's application under Ray Serve, before replicas that it places itself.

A replica is an engine in an actor of its own, on whichever machine Ray places it. Its owner
connects to it, and they talk as the two ends of a pipe do. Ray says when it has died where the
connection does not: with its machine, or cut off.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from multiprocessing.connection import Client, Connection, Listener
from secrets import token_bytes
from threading import Thread
from time import sleep
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve

from foretoken.cluster import session
from foretoken.errors import InputError, to_one_line
from foretoken.server.app import create_app
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import Child, run_engine_process
from foretoken.server.process.fleet import EngineFleet, ServedModels
from foretoken.server.process.messages import EngineSetup, LoadFailed
from foretoken.server.run import listen
from foretoken.storage.cache import get_versions

LOOPBACK_HOST = "127.0.0.1"
log = logging.getLogger(__name__)


class ReplicaActor:
    """The actor. It ends with its owner."""

    def open(self, key: bytes, node: str) -> tuple[str, int]:
        """Where it listens, for who has the key: on this machine only, if its owner is here."""
        is_local = node == ray.get_runtime_context().get_node_id()
        host = LOOPBACK_HOST if is_local else ray.util.get_node_ip_address()
        self._listener = Listener((host, 0), authkey=key)
        address = self._listener.address
        assert isinstance(address, tuple)
        return address

    def work(self, setup: EngineSetup, threads: int, owner_versions: dict[str, str]) -> None:
        """The engine's whole life, on so many threads."""
        with self._listener.accept() as pipe:
            if (installed := get_versions()) != owner_versions:
                pipe.send(LoadFailed(describe_version_differences(installed, owner_versions)))
                return
            import torch

            torch.set_num_threads(threads)
            run_engine_process(pipe, setup)


def describe_version_differences(versions: dict[str, str], owner_versions: dict[str, str]) -> str:
    """Describe versions that differ between two machines."""
    names = sorted(
        n for n in {*versions, *owner_versions} if versions.get(n) != owner_versions.get(n)
    )
    differences = [
        f"{n} {versions.get(n, 'missing')} (here {owner_versions.get(n, 'missing')})" for n in names
    ]
    node = socket.gethostname()
    return f"{node} has {', '.join(differences)}; install the same versions on all machines"


class ReplicaHandle:
    """The owner's end: a process to wait for and to kill, and a pipe that is there once Ray has
    placed the replica."""

    def __init__(self, setup: EngineSetup, threads: int) -> None:
        environment = {"OMP_NUM_THREADS": str(threads)}
        actor_class: Any = ray.remote(ReplicaActor)
        self._actor = actor_class.options(
            num_cpus=threads,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        ).remote()
        self._work_args = setup, threads, get_versions()
        self._pipe: Future[Connection] = Future()
        self._thread = Thread(target=self._run, name="foretoken replica", daemon=True)
        self._thread.start()

    def recv(self) -> Any:
        return self._pipe.result().recv()

    def send_bytes(self, buf: Any, /) -> None:
        self._pipe.result().send_bytes(buf)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        ray.kill(self._actor)

    def _run(self) -> None:
        """A thread's life: that of the actor."""
        key, node = token_bytes(32), ray.get_runtime_context().get_node_id()
        try:
            address: Any = ray.get(self._actor.open.remote(key, node))
            running = self._actor.work.remote(*self._work_args)
            self._pipe.set_result(Client(address, authkey=key))
            ray.get(running)
        except Exception as error:  # Ray's own, of every kind, and those of sockets
            log.warning("a replica ended: %s", to_one_line(error)[:200])
        finally:
            self._close_pipe()

    def _close_pipe(self) -> None:
        """Whoever reads there hears the end, whatever became of the other one."""
        if not self._pipe.done():
            self._pipe.set_exception(EOFError())
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._pipe.result().fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def place_replica(setup: EngineSetup, threads: int) -> Child:
    """A replica that Ray places and starts; as `process.spawn`."""
    remote = ReplicaHandle(setup, threads)
    return Child(remote, remote)


RAY_APP_NAME = "foretoken"
MAX_ONGOING_REQUESTS = (
    100_000  # at a time: the server's own limits are told to clients, Serve's are not
)
SHUTDOWN_MARGIN_SECONDS = (
    15.0  # seconds beyond the patience, until Serve ends what does not end itself
)
POLL_SECONDS = 0.5  # seconds between two looks at a server


def make_application(
    setup: EngineSetup, options: ServerOptions, replicas: int, threads: int
) -> serve.Application:
    """Return the application that Ray Serve runs: one process takes the requests, its replicas
    write the texts, each on so many threads."""

    def make_app() -> FastAPI:
        setup.log_options.configure()
        fleet = EngineFleet(setup, partial(place_replica, threads=threads), replicas)
        server = create_app(ServedModels({options.name: fleet}), options)
        server.state.fleet = fleet
        return server

    @serve.deployment(
        name="front",
        num_replicas=1,  # which knows all texts and who has read what
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=options.drain + SHUTDOWN_MARGIN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    @serve.ingress(make_app)
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
    setup: EngineSetup,
    options: ServerOptions,
    *,
    replicas: int,
    threads: int | None,
    address: str,
) -> None:
    """Serve until SIGTERM or Ctrl-C, as `server.run` does, by so many replicas of so many threads
    (None: the processors shared out) of the Ray at `address`. InputError as there, and for what
    Ray cannot give."""
    setup.log_options.configure()
    with listen(options.host, options.port) as listener:
        port = listener.getsockname()[1]
    session.join(address)
    try:
        threads_each = session.choose_threads_per_replica(replicas, threads)
        kv = setup.engine.get("kv_memory") or 0
        session.require_memory(replicas, session.count_weight_bytes(setup.target, setup.draft), kv)
        app = make_application(setup, options, replicas, threads_each)
        with serve_application(app, options.host, port) as front:
            log.info(
                "http://%s:%s loads %s on %s replicas",
                options.host,
                port,
                options.name,
                replicas,
            )
            try:
                while not (problem := front.problem.remote().result(timeout_s=60)):
                    sleep(POLL_SECONDS)
                raise InputError(problem)
            except KeyboardInterrupt:
                front.drain.remote().result(timeout_s=options.drain + SHUTDOWN_MARGIN_SECONDS)
    finally:
        session.leave()


@contextmanager
def serve_application(app: serve.Application, host: str, port: int) -> Iterator[Any]:
    """The application at an address, and a handle to it; at the end all of it is gone."""
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(
        proxy_location="HeadOnly",
        http_options={"host": host, "port": port},
        logging_config=quiet,
    )
    try:
        yield serve.run(app, name=RAY_APP_NAME, route_prefix="/", logging_config=quiet)
    finally:
        serve.shutdown()
