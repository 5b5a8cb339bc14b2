"""Tokens a second of one replica and of two, on as many threads each, and their memory.

    python benchmarks/replicas.py                       # the pair that ships, one thread each
    python benchmarks/replicas.py TARGET --draft DRAFT --texts 128 --tokens 64 --save replicas

Every text is asked for by a request of its own, `--at-once` of them at a time, whole, not streamed:
what a stream costs is the HTTP proxy's. The machine needs a processor for each replica, and some
more for Ray, its proxy and the front. Of the memory, PSS shares what is mapped by several processes
out among them: what the second replica adds to all of it is its own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from time import perf_counter
from typing import Any

import httpx2

import machine
import server_process

NAME = b"ray::Replica"


def memory() -> list[dict[str, int]]:
    """Bytes of every replica's process on this machine: resident, and its share of them."""
    sizes_of: list[dict[str, int]] = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if not (process / "cmdline").read_bytes().startswith(NAME):
                continue
            rows = (process / "smaps_rollup").read_text().splitlines()
        except OSError:  # it has just ended
            continue
        sizes = {row.split(":")[0]: row.split()[1] for row in rows[1:]}
        sizes_of.append({name: 1024 * int(sizes[name]) for name in ("Rss", "Pss")})
    return sizes_of


async def asked(url: str, texts: int, tokens: int, at_once: int) -> dict[str, float]:
    """Seconds and tokens of so many texts."""
    limits = httpx2.Limits(max_connections=at_once)
    async with httpx2.AsyncClient(base_url=url, timeout=900, limits=limits) as client:
        (model,) = (await client.get("/v1/models")).json()["data"]

        async def text(i: int) -> int:
            body = {"model": model["id"], "prompt": f"On day {i} the old", "max_tokens": tokens}
            body |= {"temperature": 1.0, "seed": i, "ignore_eos": True}
            answer = (await client.post("/v1/completions", json=body)).json()
            return answer["usage"]["completion_tokens"]

        await asyncio.gather(*(text(i) for i in range(at_once)))  # warm
        start = perf_counter()
        total = sum(await asyncio.gather(*(text(i) for i in range(texts))))
        seconds = perf_counter() - start
    return {"tokens": total, "seconds": seconds, "tokens_per_second": total / seconds}


def measured(count: int, arguments: argparse.Namespace) -> dict[str, Any]:
    more = ["--replicas", str(count), "--threads", str(arguments.threads)]
    command = server_process.foretoken(arguments.target, arguments.draft, arguments.dtype, *more)
    with server_process.started(command) as server:
        ready(server.url, count)
        figures = asyncio.run(
            asked(server.url, arguments.texts, arguments.tokens, arguments.at_once)
        )
        return {"replicas": count, **figures, "memory": memory()}


def ready(url: str, count: int) -> None:
    """`/ready` answers with the first of them."""
    until = perf_counter() + server_process.LOADING
    while httpx2.get(f"{url}/health", timeout=60).json()["engines"].get("ready", 0) < count:
        assert perf_counter() < until, "the replicas do not come"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("target", nargs="?")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--texts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--at-once", type=int, default=32)
    parser.add_argument("--save", help="a name for a file in benchmarks/results")
    arguments = parser.parse_args()
    one, two = (measured(count, arguments) for count in (1, 2))
    factor = two["tokens_per_second"] / one["tokens_per_second"]
    added = sum(each["Pss"] for each in two["memory"]) - one["memory"][0]["Pss"]
    result = {"threads": arguments.threads, "one": one, "two": two}
    result |= {"factor": factor, "second_adds_bytes": added}
    print(json.dumps(result, indent=2))
    if arguments.save:
        print(machine.save(arguments.save, result))


if __name__ == "__main__":
    main()
