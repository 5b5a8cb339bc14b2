"""Ray itself: started on this machine, or joined; what it has, and whether that is enough."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from logging import WARNING
from pathlib import Path
from threading import current_thread, main_thread

from foretoken.errors import InputError, to_one_line

LOCAL_RAY = "local"
OBJECT_STORE_BYTES = (
    100_000_000  # bytes of Ray's object store, where it is started here: little goes through
)
ANSWER_SECONDS = 5.0  # seconds for an address to answer
# HTTP/2, which Ray's head speaks, begins with the client's preface, and with a frame of this type
# from either side (RFC 9113, section 3.4)
SETTINGS_FRAME = b"\x04"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS_FRAME + bytes(5)
REPLICA_BASE_BYTES = 400_000_000  # bytes of a replica beside weights, keys and values
# Where it is 0, Ray takes the loopback address for this machine's and listens nowhere else, as it
# does by itself on macOS and Windows
CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def _import_ray():  # not annotated: the type is the module's
    """Import ray, late as it is an extra and reads the environment that `prepare` sets."""
    import ray

    return ray


def prepare_environment(address: str) -> None:
    """Before ray is imported, which takes seconds: a Ray that `join` is to start here (LOCAL)
    listens on the loopback alone, unless the environment says otherwise. InputError for an address
    that is invalid or does not answer."""
    if address == LOCAL_RAY:
        os.environ.setdefault(CLUSTER_VARIABLE, "0")
    elif address != "auto":
        _require_answer(address)


def join(address: str, cpus: int | None = None) -> None:
    """Become part of the cluster at `address` ("host:port", or "auto": the one that this machine is
    part of); LOCAL: of one that is started here with so many `cpus`, and ends with this process.
    `prepare` comes before. InputError where that is impossible."""
    limits = (
        {}
        if address != LOCAL_RAY
        else {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
    )
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        with _silence_stderr():
            _import_ray().init(
                address,  # LOCAL: a new one, even on a machine that is part of another
                include_dashboard=None if limits == {} else False,
                logging_level=WARNING,
                namespace="foretoken",
                **limits,
            )
    except Exception as error:  # of every kind, a plain one where a busy machine is too slow
        remedy = f"; give the address of a running one, or --ray {LOCAL_RAY}"
        raise InputError(f"Ray at {address!r}: {to_one_line(error)[:300]}{remedy}") from None
    if current_thread() is main_thread() and sigterm_handler is not None:
        signal.signal(
            signal.SIGTERM, sigterm_handler
        )  # Ray's own ends the process at once, with a dump


def leave() -> None:
    """End what `join` began."""
    _import_ray().shutdown()


def choose_threads_per_replica(replicas: int, requested: int | None) -> int:
    """Threads of a replica: as asked, or the cluster's processors shared out; InputError where it
    has too few."""
    available = int(_import_ray().cluster_resources().get("CPU", 0))
    each = requested or max(1, available // replicas)
    if each * replicas > available:
        raise InputError(
            f"{replicas} replicas with --threads {each} need {each * replicas} processors; there "
            f"are {available} in the cluster; give fewer --replicas or --threads"
        )
    return each


def require_memory(replicas: int, weight_bytes: int, kv_bytes: int) -> None:
    """InputError where so many replicas do not fit. weights: bytes of target and draft, which
    replicas of a machine share; kv: bytes of keys and values of each."""
    nodes = [node["Resources"] for node in _import_ray().nodes() if node["Alive"]]
    available = sum(int(node.get("memory", 0)) for node in nodes)
    needed = replicas * (REPLICA_BASE_BYTES + kv_bytes) + min(replicas, len(nodes)) * weight_bytes
    if needed > available:
        raise InputError(
            f"{replicas} replicas need {needed / 1e9:.1f} GB ({weight_bytes / 1e9:.1f} GB of "
            "weights on "
            f"each machine, {(REPLICA_BASE_BYTES + kv_bytes) / 1e9:.1f} GB for each replica), "
            "the cluster has "
            f"{available / 1e9:.1f} GB; give fewer --replicas, or less --kv-memory"
        )


def count_weight_bytes(*models: str | None) -> int:
    """Bytes of the models' files, of those that are folders here."""
    files = [file for name in models if name for file in Path(name).glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Drop what is written to the file descriptor of stderr: Ray's C++ parts write their attempts
    to connect there, at any log level. The error that Ray raises says the same in a line."""
    sys.stderr.flush()
    saved_stderr = os.dup(2)
    try:
        with open(os.devnull, "w") as null:
            os.dup2(null.fileno(), 2)
        yield
    finally:
        os.dup2(saved_stderr, 2)
        os.close(saved_stderr)


def _require_answer(address: str) -> None:
    """InputError for an address that nobody listens at, or something else: Ray itself waits a
    minute for the one, and says so in many lines, and for the other for ever."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--ray is {address!r}; give host:port, auto or {LOCAL_RAY}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as connection:
            connection.sendall(HTTP2_PREFACE)
            with connection.makefile("rb") as answer:
                if not os.environ.get("RAY_USE_TLS") and answer.read(4)[3:] != SETTINGS_FRAME:
                    raise OSError("something else listens there")
    except OSError as error:
        reason = error.strerror or to_one_line(error)
        raise InputError(
            f"no Ray answers at {address} ({reason}); start one with ray start --head, or give "
            f"--ray {LOCAL_RAY}"
        ) from None
