"""Replicas on two nodes of a Ray cluster on this machine: nothing is lost with one of them."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import httpx2
import pytest

import foretoken
import foretoken.cluster  # before ray, which reads what it sets
from foretoken.server.options import ServerOptions
from foretoken.server.process.messages import EngineSetup
from served import LOADING, pair, until

ray = pytest.importorskip("ray", reason="ray is not installed")
pytestmark = [pytest.mark.prove, pytest.mark.filterwarnings("default")]  # Ray's own warnings

STREAMS, SCALED, TOKENS = 200, 80, 24
BODY = {"max_tokens": TOKENS, "temperature": 1.0, "ignore_eos": True, "model": "tiny"}


@pytest.fixture(scope="module")
def nodes() -> Iterator[str]:
    """Two nodes of two processors each."""
    from ray.cluster_utils import Cluster

    from foretoken.cluster import session

    small = {"num_cpus": 2, "object_store_memory": 80_000_000}
    cluster = Cluster(initialize_head=True, head_node_args=small | {"include_dashboard": False})
    try:
        cluster.add_node(**small)
        session.join(cluster.address)
        yield cluster.address
    finally:
        session.leave()
        cluster.shutdown()


@pytest.fixture(scope="module")
def names(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return pair(tmp_path_factory.mktemp("pair"))


@contextmanager
def replicas(names: tuple[str, str], loading: dict[str, Any]) -> Iterator[str]:
    """The address of a server before two replicas, once both are ready."""
    from foretoken.cluster.serve import make_application, serve_application

    setup = EngineSetup(*names, loading, {"max_rows": 16})
    with socket.create_server(("127.0.0.1", 0)) as held:
        port = held.getsockname()[1]
    app = make_application(setup, ServerOptions("tiny", drain=5.0), 2, 1)
    with serve_application(app, "127.0.0.1", port):
        url = f"http://127.0.0.1:{port}"
        until(lambda: health(url)["engines"].get("ready") == 2, 600)
        yield url


def health(url: str) -> dict[str, Any]:
    try:
        return httpx2.get(f"{url}/health", timeout=60).json()
    except (httpx2.TransportError, ValueError):
        return {"engines": {}}


async def lines(answer: httpx2.Response) -> AsyncIterator[bytes]:
    """The lines of an answer; `aiter_lines` also ends one at some characters of a text."""
    rest = b""
    async for part in answer.aiter_bytes():
        *whole, rest = (rest + part).split(b"\n")
        for line in whole:
            yield line


async def stream(client: httpx2.AsyncClient, i: int) -> tuple[str, int]:
    """The text of request i as it was streamed, and its tokens as the steps tell of them."""
    body = BODY | {"prompt": f"number {i}", "seed": i, "stream": True}
    body |= {"speculation": {"gamma": 2, "steps": True}}
    text, tokens, ends = "", 0, 0
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in lines(answer):
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            assert "error" not in chunk, chunk
            for choice in chunk["choices"]:
                text += choice["text"]
                ends += choice["finish_reason"] is not None
            steps = chunk.get("speculation", {}).get("steps", [])
            tokens += sum(len(step["tokens"]) for step in steps)
    assert ends == 1
    return text, tokens


def unbroken(names: tuple[str, str], count: int) -> list[str]:
    """The texts of the first requests, generated in this process."""
    spec = foretoken.load(*names, **LOADING)
    params = foretoken.SamplingParams(1.0, max_new_tokens=TOKENS, ignore_eos=True)
    prompts, seeds = [f"number {i}" for i in range(count)], [(i, 0) for i in range(count)]
    return [str(done.text) for done in spec.generate(prompts, params, gamma=2, seed=seeds)]


def require_whole(url: str, found: list[tuple[str, int]], expected: list[str]) -> list[str]:
    """Nothing was lost, repeated or counted twice; returns the lines of metrics."""
    assert [text for text, _ in found] == expected
    assert {tokens for _, tokens in found} == {TOKENS}
    metrics = httpx2.get(f"{url}/metrics", timeout=60).text.splitlines()
    total = len(found) * TOKENS
    assert f'foretoken_generation_tokens_total{{model_name="tiny"}} {total}.0' in metrics
    return metrics


def test_a_replica_killed_in_mid_stream_loses_and_repeats_nothing(
    nodes: str, names: tuple[str, str]
) -> None:
    with replicas(names, LOADING) as url:
        victim = health(url)["engine"]

        async def life() -> list[tuple[str, int]]:
            limits = httpx2.Limits(max_connections=STREAMS)
            async with httpx2.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
                texts = [asyncio.create_task(stream(client, i)) for i in range(STREAMS)]
                while sum(text.done() for text in texts) < 20:
                    await asyncio.sleep(0.01)
                os.kill(victim, signal.SIGKILL)
                return await asyncio.gather(*texts)

        metrics = require_whole(url, asyncio.run(life()), unbroken(names, STREAMS))
        assert 'foretoken_engine_restarts{model_name="tiny"} 1.0' in metrics
        until(lambda: health(url)["engines"] == {"ready": 2}, 600)
        assert health(url)["engine"] != victim


def test_more_and_fewer_replicas_while_texts_are_written(
    nodes: str, names: tuple[str, str]
) -> None:
    """From two to three, and to one: no text is refused, lost or another."""
    with replicas(names, LOADING) as url:
        front: Any = ray.serve.get_app_handle("foretoken")
        places: list[tuple[str, int]] = []
        for i, count in enumerate((3, 1)):
            numbers = range(i * SCALED // 2, (i + 1) * SCALED // 2)
            places += asyncio.run(scaled(url, numbers, front, count))
            until(lambda ready=count: health(url)["engines"] == {"ready": ready}, 600)
        require_whole(url, places, unbroken(names, SCALED))
        with pytest.raises(Exception, match="count is 0"):
            front.scale.remote(0).result()


async def scaled(url: str, numbers: range, front: Any, count: int) -> list[tuple[str, int]]:
    """The texts of these, during which there come to be `count` replicas."""
    async with httpx2.AsyncClient(base_url=url, timeout=900) as client:
        texts = [asyncio.create_task(stream(client, i)) for i in numbers]
        while not any(text.done() for text in texts):
            await asyncio.sleep(0.01)
        await asyncio.to_thread(front.scale.remote(count).result)
        return await asyncio.gather(*texts)


def test_a_node_with_other_versions_is_refused(
    nodes: str, names: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from foretoken.cluster import serve

    own = serve.get_versions()
    monkeypatch.setattr(serve, "get_versions", lambda: own | {"torch": "1.0"})
    child = serve.place_replica(EngineSetup(*names, LOADING, {}), 1)
    message = child.pipe.recv()
    assert f"torch {own['torch']} (here 1.0); install the same versions" in str(message)
    child.process.join(60)


TALKS, TURNS = 10, 10


def test_conversations_find_their_prefixes(nodes: str, names: tuple[str, str]) -> None:
    """Of the tokens of a turn that the turn before had too, at least 0.9 are not read again."""
    with replicas(names, {"runtime": "native"}) as url:
        results = asyncio.run(talks(url))
    cached_sum = sum(cached for cached, _ in results)
    assert cached_sum >= 0.9 * sum(before for _, before in results), results


async def talks(url: str) -> list[tuple[int, int]]:
    """Of every turn but the first of a talk: tokens that had been read, and those of the turn
    before."""
    async with httpx2.AsyncClient(base_url=url, timeout=900) as client:

        async def talk(i: int) -> list[tuple[int, int]]:
            messages, counts, before = list[dict[str, str]](), list[tuple[int, int]](), 0
            for turn in range(TURNS):
                text = f"{i} says in turn {turn} what this conversation is about, and {i} more."
                messages.append({"role": "user", "content": text})
                body = {"model": "tiny", "messages": messages, "max_tokens": 4, "seed": turn}
                answer = (await client.post("/v1/chat/completions", json=body)).json()
                usage = answer["usage"]
                if turn:
                    counts.append((usage["prompt_tokens_details"]["cached_tokens"], before))
                before = usage["prompt_tokens"]
                messages.append({"role": "assistant", "content": "So it is."})
            return counts

        every = await asyncio.gather(*(talk(i) for i in range(TALKS)))
    return [turn for turns in every for turn in turns]
