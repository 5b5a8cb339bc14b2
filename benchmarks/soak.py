"""A server under load: 200 streams at a time over 64 connections, for minutes.

Exit code 1 where a stream is torn, a token is not accounted for, or a text differs from the offline
one by more than rounding. Expected: the 99th percentile of the gaps between tokens at most 4
medians.

    python benchmarks/soak.py [--target T --draft D] [--minutes 10]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from time import perf_counter, sleep
from typing import Any

import httpx2
import numpy as np

from differences import Difference, Offline
from foretoken import load
from machine import save
from server_process import foretoken, started
from streams import CONNECTIONS, Heard, Run, requests

POOL = 256  # distinct requests of a soak
SAMPLE = re.compile(r"^([a-z_:]+?)(?:_total)?(?:\{.*\})? ([0-9.eE+-]+)$", re.MULTILINE)
COUNTING = 5.0  # seconds until the server has counted what it has sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", help="left out: the pair that ships")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--minutes", type=float, default=10.0, help="of a soak")
    parser.add_argument("--requests", type=int, help="fewer than usual, to try it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with started(foretoken(arguments.target, arguments.draft, arguments.dtype)) as process:
        (service,) = httpx2.get(f"{process.url}/v1/models").json()["data"]
        result = soak(process.url, service, arguments)
    name = "default-pair" if arguments.target is None else "pair"
    head = {"command": " ".join(sys.argv), "arguments": vars(arguments), "server": service}
    result |= compared(result.pop("heard"), arguments)
    faults = [*result["faults"], *beyond(result["differences"])]
    print(save(f"serving-soak-{name}-{arguments.dtype}", head | result))
    if faults:
        sys.exit("\n".join(faults))


def soak(url: str, service: dict[str, Any], arguments: argparse.Namespace) -> dict[str, Any]:
    """The load and its figures; `heard` is still to be compared."""
    pool = requests(arguments.requests or POOL, service["vocab_size"], arguments.seed)
    before = sums(url)
    run = Run(url, service["id"], pool, 60 * arguments.minutes)
    seconds = asyncio.run(run.all())
    complete = [heard for heard in run.heard if not heard.failure]
    failures = Counter(heard.failure for heard in run.heard if heard.failure)
    tokens = sum(heard.completion_tokens for heard in complete)
    read = sum(heard.prompt_tokens for heard in complete)
    counted = settled(url, before, tokens)
    faults = [f"{count} requests failed: {reason}" for reason, count in failures.items()]
    usages = {"generation_tokens": tokens, "prompt_tokens": read}
    faults += [
        f"the server counts {counted[name]} {name}, its usages {usages[name]}"
        for name in (usages if not failures else ())
        if counted[name] != usages[name]
    ]
    print(f"{len(run.heard)} requests, {tokens} tokens, {seconds:.0f} s", faults, file=sys.stderr)
    return {
        "connections": CONNECTIONS,
        "seconds": seconds,
        "requests": len(run.heard),
        "streams": sum(len(heard.tokens) for heard in run.heard),
        "streams_at_a_time": at_a_time(run.heard, seconds),
        "failed": dict(failures),
        "usage": usages,
        "counted": {name: counted[name] for name in usages},
        "tokens_per_second": tokens / seconds,
        "ttft_ms": spread([t.ttft for heard in complete for t in heard.traces]),
        "gap_ms": spread(
            [g for heard in complete for t in heard.traces for g in t.gaps(each=True)]
        ),
        "step_ms": spread([g for heard in complete for t in heard.traces for g in t.gaps()]),
        "faults": faults,
        "heard": run.heard,
    }


def sums(url: str) -> Counter[str]:
    """What the server has counted since it began."""
    text = httpx2.get(f"{url}/metrics").text
    totals: Counter[str] = Counter()
    for name, value in SAMPLE.findall(text):
        if re.fullmatch("foretoken_[a-z]+_tokens", name):
            totals[name.removeprefix("foretoken_")] += int(float(value))
    return totals


def settled(url: str, before: Counter[str], tokens: int) -> Counter[str]:
    """What it has counted since `before`, which is so many tokens or soon will be."""
    end = perf_counter() + COUNTING
    while True:
        now = sums(url)
        now.subtract(before)
        if now["generation_tokens"] >= tokens or perf_counter() > end:
            return now
        sleep(0.05)


def at_a_time(heard: Sequence[Heard], seconds: float) -> float:
    """Streams that were open at a time, on average."""
    return sum(trace.end for one in heard for trace in one.traces) / seconds


def spread(seconds: Sequence[float | None]) -> dict[str, float] | None:
    """Median, 99th percentile, and the second over the first; None without values."""
    ms = [1e3 * value for value in seconds if value is not None]
    if not ms:
        return None
    low, high = np.percentile(ms, (50, 99)).tolist()
    return {"p50": low, "p99": high, "p99_over_p50": high / low if low else 0.0}


def compared(heard: Sequence[Heard], arguments: argparse.Namespace) -> dict[str, Any]:
    """Every distinct text against the offline one."""
    spec = load(arguments.target, arguments.draft, dtype=arguments.dtype)
    offline = Offline(spec)
    complete = [one for one in heard if not one.failure]
    noise = offline.measure([one.asked for one in complete])
    texts = {
        (one.asked.seed, i, tuple(tokens)): one.asked
        for one in complete
        for i, tokens in enumerate(one.tokens)
    }
    copies = Counter(
        (one.asked.seed, i, tuple(t)) for one in complete for i, t in enumerate(one.tokens)
    )
    differences = {key: offline.difference(query, key[1], key[2]) for key, query in texts.items()}
    return counts(differences, copies) | {"noise": asdict(noise)}


def counts(results: dict[Any, Difference | None], copies: Counter[Any]) -> dict[str, Any]:
    """Served texts by how they compare."""
    tally = {kind: {"distinct": 0, "served": 0} for kind in ("identical", "rounding", "beyond")}
    for key, off in results.items():
        kind = "identical" if off is None else "rounding" if off.rounding else "beyond"
        tally[kind]["distinct"] += 1
        tally[kind]["served"] += copies[key]
    differences = [asdict(off) | {"rounding": off.rounding} for off in results.values() if off]
    return {"texts": tally, "differences": differences}


def beyond(differences: Sequence[dict[str, Any]]) -> list[str]:
    return [f"beyond rounding: {off}" for off in differences if not off["rounding"]]


if __name__ == "__main__":
    main()
