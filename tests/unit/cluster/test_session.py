"""What Ray is asked for, against a cluster that is only described."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.cluster import session
from foretoken.errors import InputError


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Two nodes of 4 processors and 10 GB, and what Ray was started with."""
    keywords: dict[str, Any] = {}

    def init(address: str | None, **options: Any) -> None:
        keywords.update(options, address=address)
        os.write(2, b"gcs_client.cc:210: Failed to get cluster ID")
        if "sets" in keywords:
            signal.signal(signal.SIGTERM, keywords["sets"])
        if keywords.get("fails"):
            raise keywords["fails"]

    node = {"Alive": True, "Resources": {"CPU": 4.0, "memory": 10e9}}
    gone = {"Alive": False, "Resources": {"CPU": 4.0, "memory": 10e9}}
    fake = SimpleNamespace(
        init=init, nodes=lambda: [node, node, gone], cluster_resources=lambda: {"CPU": 8.0}
    )
    monkeypatch.setitem(sys.modules, "ray", fake)
    return keywords


def test_a_cluster_that_is_started_here_is_small_and_has_no_dashboard(cluster) -> None:
    session.join("local", 3)
    assert cluster["address"] == "local" and cluster["num_cpus"] == 3
    assert cluster["include_dashboard"] is False and cluster["object_store_memory"] <= 2**28


def test_sigterm_stays_what_it_was(cluster) -> None:
    """Ray sets a handler of its own, by which a server would not end its texts."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        cluster["sets"] = signal.SIG_DFL
        session.join("local", 3)
        assert signal.getsignal(signal.SIGTERM) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGTERM, before)


STARTED = """
import os
from pathlib import Path
from foretoken.cluster import session
session.prepare_environment("local")
session.join("local", 1)
import ray
ray.get(ray.remote(lambda: 1).remote())
own = set()
for process in Path("/proc").glob("[0-9]*"):
    try:
        if b"RAY_PORTS_OF=here" in (process / "environ").read_bytes():
            own |= {os.readlink(file) for file in (process / "fd").iterdir()}
    except OSError:
        pass  # it has just ended, or is not ours
for table in ("tcp", "tcp6"):
    for line in Path("/proc/net", table).read_text().splitlines()[1:]:
        fields = line.split()
        if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
            print(fields[1].partition(":")[0])
session.leave()
"""
LOOPBACK = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}


@pytest.mark.prove  # a cluster takes many processes, and seconds
@pytest.mark.skipif(not Path("/proc/net/tcp").exists(), reason="reads Linux's table of sockets")
def test_what_is_started_here_listens_on_the_loopback_alone() -> None:
    pytest.importorskip("ray")
    process = subprocess.run(
        [sys.executable, "-c", STARTED],
        # a machine that is part of a cluster already does not change what `local` is
        env=os.environ | {"RAY_PORTS_OF": "here", "RAY_ADDRESS": "127.0.0.1:9"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert process.returncode == 0, process.stderr
    listening = process.stdout.split()
    assert len(listening) > 4  # the head, the node, its agents, the driver and a worker
    assert set(listening) <= LOOPBACK


@pytest.mark.parametrize("address", ["nowhere", "a:b", ":7", "host:0", "host:70000"])
def test_what_is_no_address(address: str) -> None:
    with pytest.raises(InputError, match="give host:port, auto or local"):
        session.prepare_environment(address)


def test_an_address_that_does_not_answer_is_told_at_once() -> None:
    with socket.create_server(("127.0.0.1", 0)) as there:
        address = f"127.0.0.1:{there.getsockname()[1]}"
    with pytest.raises(InputError, match=f"Ray does not answer at {address} .Connection refused."):
        session.prepare_environment(address)


@pytest.mark.parametrize("kind", [RuntimeError, ConnectionError, ValueError, Exception])
def test_what_ray_says_is_one_line(cluster, capfd, kind: type[Exception]) -> None:
    cluster["fails"] = kind("Version mismatch: Ray 2.50\nPython 3.12")
    with pytest.raises(InputError) as caught:
        session.join("auto")
    assert "\n" not in str(caught.value) and "Version mismatch: Ray 2.50" in str(caught.value)
    os.write(2, b"told")
    assert capfd.readouterr().err == "told"  # nothing of Ray's own, and ours again


def test_threads_are_shared_out_and_too_many_are_refused(cluster) -> None:
    assert [session.choose_threads_per_replica(n, None) for n in (1, 2, 3, 8)] == [8, 4, 2, 1]
    assert session.choose_threads_per_replica(2, 3) == 3
    for replicas, count in ((9, None), (3, 3)):
        need = replicas * (count or 1)
        with pytest.raises(InputError, match=f"need {need} CPUs, but the cluster has 8"):
            session.choose_threads_per_replica(replicas, count)


def test_weights_count_once_a_machine_and_caches_for_every_replica(cluster) -> None:
    session.require_memory(4, 5_000_000_000, 10**9)
    with pytest.raises(
        InputError, match=r"8 replicas need 21.2 GB \(5.0 GB of weights per machine"
    ):
        session.require_memory(8, 5_000_000_000, 10**9)
    session.require_memory(1, 9_000_000_000, 0)


def test_weights_are_those_of_folders(tmp_path: Path) -> None:
    for name, size in (("a", 10), ("b", 7)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.safetensors").write_bytes(b"x" * size)
        (tmp_path / name / "other.txt").write_bytes(b"x" * size)
    assert session.count_weight_bytes(str(tmp_path / "a"), str(tmp_path / "b")) == 17
    assert session.count_weight_bytes(str(tmp_path / "a"), "lookup") == 10
    assert session.count_weight_bytes(None, None) == 0


@contextmanager
def answering(answer: bytes) -> Iterator[str]:
    """The address of what says this to whoever connects."""
    with socket.create_server(("127.0.0.1", 0)) as there:

        def other() -> None:
            connection, _ = there.accept()
            connection.sendall(answer)
            ended.wait(60)
            connection.close()

        ended, thread = threading.Event(), threading.Thread(target=other)
        thread.start()
        yield f"127.0.0.1:{there.getsockname()[1]}"
        ended.set()
        thread.join()


@pytest.mark.parametrize("answer", [b"", b"HTTP/1.1 400 Bad Request\r\n\r\n"])
def test_what_listens_and_is_no_ray_is_told(monkeypatch, answer: bytes) -> None:
    """Ray itself would wait for ever."""
    monkeypatch.setattr(session, "ANSWER_SECONDS", 0.2)
    with answering(answer) as address:
        with pytest.raises(InputError, match=f"Ray does not answer at {address} .(timed|another)"):
            session.prepare_environment(address)


def test_what_answers_as_ray_does_is_joined(cluster) -> None:
    with answering(bytes(3) + session.SETTINGS_FRAME + bytes(5)) as address:
        session.prepare_environment(address)
        session.join(address)
    assert cluster["address"] == address
    assert not {"num_cpus", "object_store_memory"} & cluster.keys()  # left as it is
