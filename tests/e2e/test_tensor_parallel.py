"""The command over two processes: the text of one, however they are started; and their ends, of any
kind, which leave no process. Families with a plan have their logits."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx2
import pytest
import torch

import foretoken
import served
from foretoken.models.families import build
from foretoken.models.parallel.model import on_ranks
from foretoken.models.parallel.ranks import start
from foretoken.models.stock.selfcheck import deviation, stir
from tiny import byte_level, folder, llama

pytestmark = pytest.mark.prove  # every run is two processes, which take seconds to begin

MAIN = ("-m", "foretoken")
RUN = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--rdzv-backend", "c10d")
TORCHRUN = (*RUN, "--rdzv-endpoint", "127.0.0.1:0", "--local-addr", "127.0.0.1", *MAIN)
SPREAD = ("--tensor-parallel", "2")


@pytest.fixture(scope="module")
def options(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    base = tmp_path_factory.mktemp("pair")
    folder(base / "target", llama(context=4096, eos_token_id=None), byte_level())
    folder(base / "draft", llama(context=4096, seed=1), byte_level())
    pair = ("--target", str(base / "target"), "--draft", str(base / "draft"), "--gamma", "2")
    return (*pair, "--dtype", "float64", "--runtime", "transformers", "It was the")


def started(way: tuple[str, ...], *options: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, *way, "generate", *options],
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_proof_the_same_text_however_it_is_started(options: tuple[str, ...]) -> None:
    short = ("--max-new-tokens", "40", *options)
    alone, spread, by_torchrun = (
        started(way, *more, *short).communicate(timeout=900)[0]
        for way, more in ((MAIN, ()), (MAIN, SPREAD), (TORCHRUN, SPREAD))
    )
    assert alone == spread == by_torchrun and len(alone) > 20


@pytest.fixture
def streaming(options: tuple[str, ...]) -> Iterator[tuple[subprocess.Popen[str], int]]:
    """A command that is writing, and its other rank."""
    process = started(MAIN, *SPREAD, "--max-new-tokens", "3000", *options)
    assert process.stdout is not None and process.stdout.read(1)
    (other,) = followers(process.pid)
    yield process, other
    process.kill()
    process.communicate()


def followers(pid: int) -> list[int]:
    """The other ranks that a process has started."""
    children = Path(f"/proc/{pid}/task").glob("*/children")
    processes = [int(child) for file in children for child in file.read_text().split()]
    return [child for child in processes if b"follower" in command(child)]


def command(pid: int) -> bytes:
    """What a process runs; b"" where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""


def require_ended(pid: int) -> None:
    until = time.monotonic() + 60
    while b"follower" in command(pid):
        assert time.monotonic() < until, "a rank is left"
        time.sleep(0.1)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
@pytest.mark.parametrize(
    ("end", "code", "says"),
    [
        ("its other rank is killed", 2, "error: rank 1 of 2 has ended (SIGKILL)\n"),
        ("Ctrl-C", 130, "interrupted after "),
        ("it is killed", -9, ""),
    ],
)
def test_proof_an_end_leaves_one_line_and_no_process(
    streaming: tuple[subprocess.Popen[str], int], end: str, code: int, says: str
) -> None:
    process, other = streaming
    if end == "its other rank is killed":
        os.kill(other, signal.SIGKILL)
    else:
        process.send_signal(signal.SIGINT if end == "Ctrl-C" else signal.SIGKILL)
    lines = process.communicate(timeout=300)[1].splitlines()
    told = [line for line in lines if line and not line.startswith("loading ")]  # a slow start
    assert process.returncode == code and len(told) == bool(says)
    assert all(line.startswith(says.strip()) for line in told)
    require_ended(other)


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_proof_a_server_starts_again_without_a_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its texts are those of one process; a rank that is killed costs what was being written, and
    no more."""
    monkeypatch.setitem(served.LOADING, "tensor_parallel", 2)
    names = served.pair(tmp_path)
    body = {"model": "tiny", "prompt": "It was the", "max_tokens": 40, "seed": 3}
    body["speculation"] = {"gamma": 2}
    alone = foretoken.load(*names, runtime="transformers", dtype="float64")
    params = foretoken.SamplingParams(1.0, max_new_tokens=40)
    expected = alone.generate(body["prompt"], params, gamma=2, seed=3)[0].text
    with served.serving(*names) as (url, link):

        def text() -> str:
            answer = httpx2.post(f"{url}/v1/completions", json=body, timeout=120)
            assert answer.status_code == 200, answer.text
            return answer.json()["choices"][0]["text"]

        assert text() == expected
        (other,) = followers(link.info.pid)
        os.kill(other, signal.SIGKILL)
        lost = httpx2.post(f"{url}/v1/completions", json=body, timeout=120)
        assert lost.status_code == 503, lost.text
        served.until(lambda: link.state == "ready" and link.restarts == 1, 120)
        assert text() == expected
        (other,) = followers(link.info.pid)
    require_ended(other)


@pytest.mark.parametrize("name", ["Qwen2", "Qwen3", "Mistral", "Gemma 3", "Phi-3", "GPT-NeoX"])
def test_proof_families_with_a_plan(name: str) -> None:
    """In float64, in which Mixtral's experts do not run, and Gemma 2's attention is not."""
    torch.manual_seed(0)
    network = build(name)
    stir(network)
    network = network.double().eval()
    ranks = start(2)
    assert deviation(network, on_ranks(ranks).run(network)) < 1e-12
    if name == "GPT-NeoX":
        ranks.close()
