"""The same requests to two servers of one model on this CPU, in turns: ours with its draft, and
OpenVINO GenAI's batching behind a minimal loop. Greedy texts of one length; no prompt comes twice.

Expected: ahead with one request at a time, where draft tokens are accepted; behind with many, as
GenAI's products of many rows in int8 are faster.

    python benchmarks/peers/make.py openvino-genai
    python benchmarks/serving_peers.py TARGET --draft lookup --dtype int8 --prompts FILE

TARGET: a folder; FILE: a prompt of ids a line, {"prompt": [..]}, 72 for a round and as many first.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

import httpx2

from machine import save
from server_process import Process, foretoken, started

LOADS = {1: 8, 4: 16, 16: 48}  # requests at a time: requests
ROUNDS, NEW = 5, 64
PEERS = Path(__file__).parent / "peers"
GENAI = PEERS.parents[1] / ".peers" / "openvino-genai" / "bin" / "python"


class Figures(NamedTuple):
    """Of one load on one server."""

    tokens_per_second: float
    first_seconds: float  # medians over the requests
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path)
    parser.add_argument("--draft", default="lookup")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--prompts", type=Path, required=True)
    given = parser.parse_args()
    prompts = [json.loads(line)["prompt"] for line in given.prompts.read_text().splitlines()]
    if len(prompts) < (1 + ROUNDS) * sum(LOADS.values()):
        parser.error(f"{given.prompts} has {len(prompts)} prompts; give 72 for each of 6 rounds")
    loop = [str(GENAI), str(PEERS / "serve_openvino_genai.py"), str(given.target), given.dtype]
    rounds: list[dict[str, dict[str, Figures]]] = []
    with ExitStack() as running:
        own = foretoken(str(given.target), given.draft, given.dtype)
        servers = {
            "foretoken": running.enter_context(started(own)),
            "openvino-genai": running.enter_context(started([*loop, sys.executable], "/")),
        }
        for number in range(1 + ROUNDS):  # the first warms up
            order = list(servers) if number % 2 else list(reversed(servers))
            rounds.append(measured({name: servers[name] for name in order}, prompts))
    document = {"target": given.target.name, "draft": given.draft, "dtype": given.dtype}
    document |= {"loads": LOADS, "new": NEW, "rounds": [as_dicts(each) for each in rounds[1:]]}
    for at_once in map(str, LOADS):
        pairs = [(each[at_once]["foretoken"], each[at_once]["openvino-genai"]) for each in rounds]
        over = median(a.tokens_per_second / b.tokens_per_second for a, b in pairs[1:])
        first = median(b.first_seconds / a.first_seconds for a, b in pairs[1:])
        print(f"{at_once} at a time: {over:.2f} of its tokens a second, first token {first:.2f}")
    print(save(f"serving-genai-{given.dtype}", document))


def measured(
    servers: dict[str, Process], prompts: list[list[int]]
) -> dict[str, dict[str, Figures]]:
    """A round: every load on every server, which takes its prompts off the list."""
    figures: dict[str, dict[str, Figures]] = {}
    for at_once, count in LOADS.items():
        texts = [prompts.pop() for _ in range(count)]
        figures[str(at_once)] = {
            name: asyncio.run(loaded(server.url, texts, at_once))
            for name, server in servers.items()
        }
    return figures


async def loaded(url: str, texts: list[list[int]], at_once: int) -> Figures:
    gate = asyncio.Semaphore(at_once)
    async with httpx2.AsyncClient(timeout=900) as client:
        listing = await client.get(f"{url}/v1/models")
        model = listing.json()["data"][0]["id"] if listing.content else ""
        start = perf_counter()
        times = await asyncio.gather(*(heard(client, url, model, ids, gate) for ids in texts))
        seconds = perf_counter() - start
    return Figures(NEW * len(texts) / seconds, *(median(each) for each in zip(*times, strict=True)))


async def heard(
    client: httpx2.AsyncClient, url: str, model: str, ids: list[int], gate: asyncio.Semaphore
) -> tuple[float, float]:
    """Seconds until the first token of a text, and until its last."""
    body: dict[str, Any] = {"model": model, "prompt": ids, "max_tokens": NEW, "temperature": 0.0}
    body |= {"stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}
    first, made = 0.0, 0
    async with gate:
        start = perf_counter()
        async with client.stream("POST", f"{url}/v1/completions", json=body) as answer:
            if answer.status_code != 200:
                raise RuntimeError(f"{url}: {(await answer.aread()).decode()}")
            async for line in answer.aiter_lines():
                if line.startswith("data: {"):
                    chunk = json.loads(line.removeprefix("data: "))
                    first = first or perf_counter() - start
                    made = (chunk.get("usage") or {}).get("completion_tokens", made)
        if made != NEW:
            raise RuntimeError(f"{url} wrote {made} tokens, not {NEW}")
        return first, perf_counter() - start


def as_dicts(figures: dict[str, dict[str, Figures]]) -> dict[str, Any]:
    return {
        at_once: {name: each._asdict() for name, each in row.items()}
        for at_once, row in figures.items()
    }


if __name__ == "__main__":
    main()
