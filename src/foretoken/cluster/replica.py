"""A replica: an engine in an actor of its own, on whichever machine Ray places it.

Its owner connects to it, and they talk as the two ends of a pipe do. Ray says when it has died
where the connection does not: with its machine, or cut off.
"""

from __future__ import annotations

import logging
import os
import socket
from concurrent.futures import Future
from contextlib import suppress
from multiprocessing.connection import Client, Connection, Listener
from secrets import token_bytes
from threading import Thread
from typing import Any

import ray

from foretoken.errors import one_line
from foretoken.server.process.client import Child
from foretoken.server.process.messages import Failed
from foretoken.server.process.worker import Setup, work
from foretoken.storage.versions import versions

LOOPBACK = "127.0.0.1"
log = logging.getLogger(__name__)


class ReplicaActor:
    """The actor. It ends with its owner."""

    def open(self, key: bytes, node: str) -> tuple[str, int]:
        """Where it listens, for who has the key: on this machine only, if its owner is here."""
        near = node == ray.get_runtime_context().get_node_id()
        host = LOOPBACK if near else ray.util.get_node_ip_address()
        self._listener = Listener((host, 0), authkey=key)
        address = self._listener.address
        assert isinstance(address, tuple)
        return address

    def work(self, setup: Setup, threads: int, owners: dict[str, str]) -> None:
        """The engine's whole life, on so many threads."""
        with self._listener.accept() as pipe:
            if (installed := versions()) != owners:
                pipe.send(Failed(unlike(installed, owners)))
                return
            import torch

            torch.set_num_threads(threads)
            work(pipe, setup)


def unlike(own: dict[str, str], owners: dict[str, str]) -> str:
    """What to tell of versions that differ between two machines."""
    names = sorted(n for n in {*own, *owners} if own.get(n) != owners.get(n))
    differences = [f"{n} {own.get(n, 'missing')} (here {owners.get(n, 'missing')})" for n in names]
    node = socket.gethostname()
    return f"{node} has {', '.join(differences)}; install the same versions on all machines"


class ReplicaHandle:
    """The owner's end: a process to wait for and to kill, and a pipe that is there once Ray has
    placed the replica."""

    def __init__(self, setup: Setup, threads: int) -> None:
        environment = {"OMP_NUM_THREADS": str(threads)}
        actor_class: Any = ray.remote(ReplicaActor)
        self._actor = actor_class.options(
            num_cpus=threads,
            scheduling_strategy="SPREAD",
            runtime_env={"env_vars": environment},
        ).remote()
        self._life = setup, threads, versions()
        self._pipe: Future[Connection] = Future()
        self._thread = Thread(target=self._live, name="foretoken replica", daemon=True)
        self._thread.start()

    def recv(self) -> Any:
        return self._pipe.result().recv()

    def send_bytes(self, buf: Any, /) -> None:
        self._pipe.result().send_bytes(buf)

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)

    def kill(self) -> None:
        ray.kill(self._actor)

    def _live(self) -> None:
        """A thread's life: that of the actor."""
        key, node = token_bytes(32), ray.get_runtime_context().get_node_id()
        try:
            address: Any = ray.get(self._actor.open.remote(key, node))
            running = self._actor.work.remote(*self._life)
            self._pipe.set_result(Client(address, authkey=key))
            ray.get(running)
        except Exception as error:  # Ray's own, of every kind, and those of sockets
            log.warning("a replica ended: %s", one_line(error)[:200])
        finally:
            self._cut()

    def _cut(self) -> None:
        """Whoever reads there hears the end, whatever became of the other one."""
        if not self._pipe.done():
            self._pipe.set_exception(EOFError())
            return
        with suppress(OSError), socket.socket(fileno=os.dup(self._pipe.result().fileno())) as copy:
            copy.shutdown(socket.SHUT_RDWR)


def placed(setup: Setup, threads: int) -> Child:
    """A replica that Ray places and starts; as `process.spawned`."""
    remote = ReplicaHandle(setup, threads)
    return Child(remote, remote)
