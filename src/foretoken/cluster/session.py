"""Start a Ray cluster on this machine or join a running one, and check its CPUs and memory."""

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
OBJECT_STORE_BYTES = 100_000_000  # if Ray is started here; little data passes through the store
ANSWER_SECONDS = 5.0  # timeout for an answer from an address
# Ray's head speaks HTTP/2: the client sends a preface first, then both sides send a frame of this
# type (RFC 9113, section 3.4)
SETTINGS_FRAME = b"\x04"
HTTP2_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(3) + SETTINGS_FRAME + bytes(5)
REPLICA_BASE_BYTES = 400_000_000  # memory of a replica without its weights and KV cache
# If this variable is 0, Ray listens on the loopback only, as by default on macOS and Windows
CLUSTER_VARIABLE = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"


def _import_ray():  # not annotated: the type is the module's
    """Import ray and return it. The import is late as ray is an extra and reads the variables that
    `prepare_environment` sets."""
    import ray

    return ray


def prepare_environment(address: str) -> None:
    """Prepare for `join`; call it before ray is imported. For LOCAL_RAY, set the variable that
    makes Ray listen on the loopback only, unless the user has set it. For host:port, raise
    InputError if the address is invalid or no Ray answers at it."""
    if address == LOCAL_RAY:
        os.environ.setdefault(CLUSTER_VARIABLE, "0")
    elif address != "auto":
        _require_answer(address)


def join(address: str, cpus: int | None = None) -> None:
    """Join a Ray cluster, or start one. Call `prepare_environment` before.

    Args:
        address: "host:port"; "auto": the cluster that runs on this machine; LOCAL_RAY: start a new
            cluster, which ends with this process.
        cpus: CPUs of a new cluster; None: all.

    Raises:
        InputError: The cluster cannot be joined or started.
    """
    limits = (
        {}
        if address != LOCAL_RAY
        else {"num_cpus": cpus, "object_store_memory": OBJECT_STORE_BYTES}
    )
    sigterm_handler = signal.getsignal(signal.SIGTERM)
    try:
        with _silence_stderr():
            _import_ray().init(
                address,  # "local" starts a new cluster even if one runs on this machine
                include_dashboard=None if limits == {} else False,
                logging_level=WARNING,
                namespace="foretoken",
                **limits,
            )
    except Exception as error:  # Ray raises many classes; after a timeout even a bare Exception
        remedy = f"; give the address of a running cluster, or --ray {LOCAL_RAY}"
        raise InputError(
            f"the Ray cluster {address!r} cannot be used: {to_one_line(error)[:300]}{remedy}"
        ) from None
    if current_thread() is main_thread() and sigterm_handler is not None:
        # Ray's handler would end the process at once, with a dump
        signal.signal(signal.SIGTERM, sigterm_handler)


def leave() -> None:
    """Leave the cluster. If `join` started the cluster, the cluster ends."""
    _import_ray().shutdown()


def choose_threads_per_replica(replicas: int, requested: int | None) -> int:
    """Return the number of threads per replica: `requested`, or an equal share of the cluster's
    CPUs if `requested` is None. Raises InputError if the cluster has too few CPUs."""
    available = int(_import_ray().cluster_resources().get("CPU", 0))
    each = requested or max(1, available // replicas)
    if each * replicas > available:
        raise InputError(
            f"{replicas} replicas with --threads {each} need {each * replicas} CPUs, but the "
            f"cluster has {available}; give fewer --replicas or --threads"
        )
    return each


def require_memory(replicas: int, weight_bytes: int, kv_bytes: int) -> None:
    """Raise InputError if the cluster has too little memory for the replicas.

    `weight_bytes`: bytes of the weights of target and draft, which the replicas on a machine share.
    `kv_bytes`: bytes of the KV cache of each replica.
    """
    nodes = [node["Resources"] for node in _import_ray().nodes() if node["Alive"]]
    available = sum(int(node.get("memory", 0)) for node in nodes)
    needed = replicas * (REPLICA_BASE_BYTES + kv_bytes) + min(replicas, len(nodes)) * weight_bytes
    if needed > available:
        raise InputError(
            f"{replicas} replicas need {needed / 1e9:.1f} GB ({weight_bytes / 1e9:.1f} GB of "
            f"weights per machine, {(REPLICA_BASE_BYTES + kv_bytes) / 1e9:.1f} GB per replica), "
            f"but the cluster has {available / 1e9:.1f} GB; give fewer --replicas, or less "
            "--kv-memory"
        )


def count_weight_bytes(*models: str | None) -> int:
    """Return the bytes of the safetensors files of the models that are folders; other models count
    0."""
    files = [file for name in models if name for file in Path(name).glob("*.safetensors")]
    return sum(file.stat().st_size for file in files)


@contextmanager
def _silence_stderr() -> Iterator[None]:
    """Discard output to the file descriptor of stderr: Ray's C++ code logs its connection attempts
    there, at any log level. Ray's exception contains the reason of a failure."""
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
    """Raise InputError if no server, or a server other than Ray, listens at an address. Ray itself
    would wait for a minute in the first case, and forever in the second."""
    host, _, port = address.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"--ray is {address!r}; give host:port, auto or {LOCAL_RAY}")
    try:
        with socket.create_connection((host.strip("[]"), int(port)), ANSWER_SECONDS) as connection:
            connection.sendall(HTTP2_PREFACE)
            with connection.makefile("rb") as answer:
                if not os.environ.get("RAY_USE_TLS") and answer.read(4)[3:] != SETTINGS_FRAME:
                    raise OSError("another server listens there")
    except OSError as error:
        reason = error.strerror or to_one_line(error)
        raise InputError(
            f"Ray does not answer at {address} ({reason}); start it with ray start --head, or give "
            f"--ray {LOCAL_RAY}"
        ) from None
