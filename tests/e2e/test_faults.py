"""Faults under a server: what its clients are told, and that it answers again.

One server's model has faults that prompts call for (`tests/faulty.py`); its engine's clock jumps at
every look, and its memory is short. Others are processes of the command, which signals reach. An
engine that is killed: `tests/unit/server/test_app.py`.
"""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx2
import pytest

import faulty
from foretoken.server import run
from foretoken.server.process import client as clients
from foretoken.server.process.client import EngineClient
from foretoken.server.run import HttpConnection
from served import pair, serving, until
from tiny import byte_level

SAMPLING: dict[str, Any] = {"temperature": 1.0, "seed": 7, "speculation": {"gamma": 2}}
SAMPLING |= {"max_tokens": 40}
Server = tuple[str, EngineClient]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = str(tmp_path_factory.mktemp("tokenizer"))
    byte_level().save_pretrained(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clients, "run_engine_process", faulty.work)
        with serving(folder, None, begin=clients.spawn, max_waiting=64) as running:
            yield running


def post(url: str, **sampling: Any) -> httpx2.Response:
    return httpx2.post(f"{url}/v1/completions", json=SAMPLING | sampling, timeout=60)


def lasting(url: str, **sampling: Any) -> tuple[list[Any], Any]:
    """The events of a stream, and the error that ended it or None."""
    lines = post(url, **sampling, stream=True).text.strip().split("\n\n")
    assert all(line.startswith("data: ") for line in lines)
    events = [line.removeprefix("data: ") for line in lines]
    if events[-1] == "[DONE]":
        return [json.loads(event) for event in events[:-1]], None
    *chunks, last = map(json.loads, events)
    return chunks, last["error"]


def text(events: list[Any]) -> str:
    return "".join(event["choices"][0]["text"] for event in events)


def gauges(url: str) -> list[float]:
    page = httpx2.get(f"{url}/metrics").text
    matches = re.findall(r"^foretoken_num_requests_(?:running|waiting){.*} (.*)$", page, re.M)
    return [float(value) for value in matches]


def recovered(url: str) -> None:
    """No row is left, and the next request is answered as ever."""
    until(lambda: httpx2.get(f"{url}/ready").status_code == 200)
    until(lambda: gauges(url) == [0.0, 0.0])
    answer = post(url, prompt=[5, 6, 7])
    assert answer.status_code == 200 and answer.json()["usage"]["completion_tokens"] == 40
    assert abs(answer.json()["created"] - time.time()) < 60


@pytest.mark.daily(faulty.RAISES)
@pytest.mark.parametrize("fault", [faulty.RAISES, faulty.EXHAUSTED, faulty.GREEDY])
def test_a_step_that_fails(server: Server, fault: int) -> None:
    """What raised is nobody's row, so all texts that run end; the engine goes on. The memory of
    its process is bounded: one of the steps wants more."""
    url, link = server
    pid = link.info.pid
    chunks, error = lasting(url, prompt=[fault, 5, 6])
    assert text(chunks) and error["code"] == "engine_failed" and error["type"] == "server_error"
    answer = post(url, prompt=[fault, 5, 6])
    assert answer.status_code == 500 and "\n" not in answer.json()["error"]["message"]
    recovered(url)
    assert link.info.pid == pid


def test_logits_that_are_no_distribution_fail_their_row_alone(server: Server) -> None:
    url, _ = server
    mates = [{"prompt": [5, 6, i], "seed": i, "max_tokens": 90} for i in range(20, 23)]
    alone = [text(lasting(url, **mate)[0]) for mate in mates]
    with ThreadPoolExecutor(4) as pool:
        beside = [pool.submit(lasting, url, **mate) for mate in mates]
        chunks, error = lasting(url, prompt=[faulty.NAN, 5, 6])
        answers = [each.result() for each in beside]
    assert text(chunks) and error["code"] == "engine_failed" and "NaN" in error["message"]
    assert [error for _, error in answers] == [None] * 3
    assert [text(events) for events, _ in answers] == alone
    assert post(url, prompt=[faulty.NAN, 5, 6]).status_code == 500
    recovered(url)


@pytest.mark.prove
def test_a_client_that_reads_a_byte_a_second(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It loses its connection, and its rows, long before its texts' ends; others do not notice."""
    url, link = server
    connect = HttpConnection.connection_made

    def narrow(self: HttpConnection, transport: Any) -> None:
        """What the system takes off the server's hands is a few KB, as in a full network."""
        transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
        connect(self, transport)

    monkeypatch.setattr(HttpConnection, "connection_made", narrow)
    monkeypatch.setattr(run, "WRITE_STALL_SECONDS", 0.5)
    sampling = {"prompt": [faulty.SLOW, 5], "n": 4, "max_tokens": 390, "logprobs": 20}
    body = json.dumps(SAMPLING | sampling | {"stream": True, "speculation": {"gamma": 0}})
    with socket.socket() as slow:
        slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        slow.connect(("127.0.0.1", int(url.rsplit(":", 1)[1])))
        kind = f"Content-Type: application/json\r\nContent-Length: {len(body)}"
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\n{kind}\r\n\r\n"
        slow.sendall((head + body).encode())
        over = threading.Event()
        reader = threading.Thread(target=_read_slowly, args=(slow, over))
        reader.start()
        try:
            until(lambda: link.running == 4)
            began = time.monotonic()
            assert post(url, prompt=[5]).status_code == 200  # waits for one of its rows
            assert time.monotonic() - began < 390 * faulty.PACE
        finally:
            over.set()
            reader.join()
    recovered(url)


def _read_slowly(slow: socket.socket, over: threading.Event) -> None:
    while not over.wait(1.0):
        try:
            slow.recv(1)
        except OSError:  # the connection is gone
            return


@pytest.mark.prove
def test_a_step_that_hangs(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those behind it hear of it as of an engine that died; nobody who is answered does."""
    url, link = server
    pid = link.info.pid
    with ThreadPoolExecutor(2) as pool:
        hung = pool.submit(lasting, url, prompt=[faulty.HANGS, 5, 6])
        until(lambda: link.running == 1)
        monkeypatch.setattr(clients, "STALL_TIMEOUT_S", 3.0)
        behind = pool.submit(post, url, prompt=[5])
        chunks, error = hung.result()
        assert text(chunks) and error["code"] == "engine_stopped"
        answer = behind.result()
    assert answer.status_code == 503 and answer.headers["retry-after"]
    monkeypatch.undo()
    recovered(url)
    assert link.info.pid != pid


CLOCK = """
import time
jumps, real = iter(range(10**9)), time.time
time.time = lambda: real() + (7200 if next(jumps) % 2 else -7200)
from foretoken.cli import main
main()
"""


@contextmanager
def process(
    target: str, port: int, code: list[str], *more: str, log: Path
) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """The command on a port, once it is ready."""
    options = ["--draft", "none", "--runtime", "transformers", "--port", str(port), *more]
    with log.open("wb") as errors:
        running = subprocess.Popen(
            [sys.executable, *code, "serve", target, *options], stderr=errors
        )
    url = f"http://127.0.0.1:{port}"
    try:
        until(lambda: _status(f"{url}/ready") == 200)
        yield running, url
    finally:
        running.kill()
        running.wait(30)


def _status(url: str) -> int | None:
    """None where nobody listens."""
    try:
        return httpx2.get(url).status_code
    except httpx2.TransportError:
        return None


def _torn(url: str, **sampling: Any) -> bool:
    """Whether a stream broke off without a last word."""
    try:
        lasting(url, **sampling)
    except httpx2.TransportError:
        return True
    return False


LOAD = {"prompt": "It", "max_tokens": 1000, "ignore_eos": True}


@pytest.mark.prove
def test_ends_under_load(tmp_path: Path) -> None:
    """SIGKILL: the engine ends too, and the port is free at once. There, another server, whose
    clock jumps and whose log is a full disk, answers; SIGTERM ends it in order and in time."""
    target, _ = pair(tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as socket_taken:
        port = socket_taken.getsockname()[1]
    with process(target, port, ["-m", "foretoken"], log=tmp_path / "log") as (first, url):
        engine = httpx2.get(f"{url}/health").json()["engine"]
        with ThreadPoolExecutor(8) as pool:
            streams = [pool.submit(_torn, url, **LOAD) for _ in range(8)]
            until(lambda: sum(gauges(url)) == 8)
            first.kill()
            assert all(stream.result() for stream in streams)
        first.wait(30)
        full = ["-c", CLOCK], "--drain", "1", "--max-rows", "2"
        with process(target, port, *full, log=Path("/dev/full")) as (second, url):
            until(lambda: not Path(f"/proc/{engine}").exists(), 10.0)
            with ThreadPoolExecutor(8) as pool:
                streams = [pool.submit(lasting, url, **LOAD) for _ in range(8)]
                until(lambda: sum(gauges(url)) == 8)
                second.send_signal(signal.SIGTERM)
                until(lambda: _status(f"{url}/ready") in (None, 503), 1.0)
                began = time.monotonic()
                errors = [stream.result()[1] for stream in streams]
                assert second.wait(30) == 0 and time.monotonic() - began < 10
    codes = {error["code"] for error in errors if error is not None}
    assert codes == {"engine_stopped"}, "none was cut off, so nothing is shown"
