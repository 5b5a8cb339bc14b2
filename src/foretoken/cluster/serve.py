"""The server's application under Ray Serve, and the replicas of its engine.

A replica is an engine in its own actor, on a machine that Ray chooses. The server connects to the
replica and uses the connection like a pipe. If a machine or its network fails, the connection may
stay open; Ray then reports the replica's death.
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
    """The Ray actor of a replica's engine. It ends when its owner, the server, ends."""

    def open(self, key: bytes, node: str) -> tuple[str, int]:
        """Start to listen for the owner's connection and return the address to connect to. `key`:
        secret that the owner must know; `node`: Ray's id of the owner's machine. If the owner is on
        this machine, the address is a loopback address."""
        is_local = node == ray.get_runtime_context().get_node_id()
        host = LOOPBACK_HOST if is_local else ray.util.get_node_ip_address()
        self._listener = Listener((host, 0), authkey=key)
        address = self._listener.address
        assert isinstance(address, tuple)
        return address

    def work(self, setup: EngineSetup, threads: int, owner_versions: dict[str, str]) -> None:
        """Wait for the owner to connect, then run the engine with `threads` threads until the owner
        closes the connection. If this machine's package versions differ from the owner's, send
        LoadFailed instead."""
        with self._listener.accept() as pipe:
            if (installed := get_versions()) != owner_versions:
                pipe.send(LoadFailed(describe_version_differences(installed, owner_versions)))
                return
            import torch

            torch.set_num_threads(threads)
            run_engine_process(pipe, setup)


def describe_version_differences(versions: dict[str, str], owner_versions: dict[str, str]) -> str:
    """Return a message about packages whose versions on this machine (`versions`) differ from the
    versions on the owner's machine (`owner_versions`)."""
    names = sorted(
        n for n in {*versions, *owner_versions} if versions.get(n) != owner_versions.get(n)
    )
    differences = [
        f"{n} {versions.get(n, 'missing')} (here {owner_versions.get(n, 'missing')})" for n in names
    ]
    node = socket.gethostname()
    return f"{node} has {', '.join(differences)}; install the same versions on all machines"


class ReplicaHandle:
    """The owner's handle of a replica, which is used both as `Process` and as `Pipe` of a `Child`.
    `recv` and `send_bytes` wait until Ray has placed the replica and the replica is connected."""

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
        """Run in a thread: connect to the actor and wait until the actor ends."""
        key, node = token_bytes(32), ray.get_runtime_context().get_node_id()
        try:
            address: Any = ray.get(self._actor.open.remote(key, node))
            running = self._actor.work.remote(*self._work_args)
            self._pipe.set_result(Client(address, authkey=key))
            ray.get(running)
        except Exception as error:  # of a socket, or of Ray: its errors have no common class
            log.warning("a replica ended: %s", to_one_line(error)[:200])
        finally:
            self._close_pipe()

    def _close_pipe(self) -> None:
        """Close the pipe so that a `recv` that waits in another thread raises EOFError."""
        if not self._pipe.done():
            self._pipe.set_exception(EOFError())
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._pipe.result().fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def place_replica(setup: EngineSetup, threads: int) -> Child:
    """Start a replica on Ray without waiting for it, and return it as a `Child`."""
    remote = ReplicaHandle(setup, threads)
    return Child(remote, remote)


RAY_APP_NAME = "foretoken"
# Larger than the server's own limits, as the server's errors are clearer than Ray's
MAX_ONGOING_REQUESTS = 100_000
SHUTDOWN_MARGIN_SECONDS = 15.0  # from the end of the drain until Ray Serve kills the server
POLL_SECONDS = 0.5  # between checks of the server


def make_application(
    setup: EngineSetup, options: ServerOptions, replicas: int, threads: int
) -> serve.Application:
    """Return the application for Ray Serve: one process handles HTTP requests, and `replicas`
    engines with `threads` threads each generate the outputs."""

    def make_app() -> FastAPI:
        setup.log_options.configure()
        fleet = EngineFleet(setup, partial(place_replica, threads=threads), replicas)
        server = create_app(ServedModels({options.name: fleet}), options)
        server.state.fleet = fleet
        return server

    @serve.deployment(
        name="front",
        num_replicas=1,  # this process holds the state of all requests
        max_ongoing_requests=MAX_ONGOING_REQUESTS,
        graceful_shutdown_timeout_s=options.drain + SHUTDOWN_MARGIN_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )
    @serve.ingress(make_app)
    class Front:
        def find_problem(self) -> str:
            """Return the reason why the models could not be loaded; "" without an error."""
            return self._fleet.problem

        async def scale(self, count: int) -> None:
            """Change the number of replicas. A removed replica has at most `options.drain` seconds
            to finish its requests."""
            if count < 1:
                raise InputError(f"count is {count}; give a whole number from 1")
            self._fleet.scale(count, options.drain)

        async def drain(self) -> None:
            """Refuse new requests and wait until running requests have finished, for at most
            `options.drain` seconds."""
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
    """Serve until SIGTERM or Ctrl-C, like `server.run.run`, with replicas on a Ray cluster.

    Args:
        setup: Setup of each engine.
        options: Options of the server.
        replicas: Number of engines.
        threads: Threads per replica; None: an equal share of the cluster's CPUs.
        address: Address of the cluster, as for `session.join`.

    Raises:
        InputError: The HTTP address cannot be used, the model cannot be loaded, or the cluster
            cannot be reached or has too few CPUs or too little memory.
    """
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
                "http://%s:%s is loading %s on %s replicas",
                options.host,
                port,
                options.name,
                replicas,
            )
            try:
                while not (problem := front.find_problem.remote().result(timeout_s=60)):
                    sleep(POLL_SECONDS)
                raise InputError(problem)
            except KeyboardInterrupt:
                front.drain.remote().result(timeout_s=options.drain + SHUTDOWN_MARGIN_SECONDS)
    finally:
        session.leave()


@contextmanager
def serve_application(app: serve.Application, host: str, port: int) -> Iterator[Any]:
    """Run the application with Ray Serve at `host:port` and yield a handle of the application. At
    the end, shut Ray Serve down."""
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
