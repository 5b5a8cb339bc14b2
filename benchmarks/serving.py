"""A server under load, and what serving costs beside the engine alone.

soak: 200 streams at a time over 64 connections, for minutes. Exit code 1 where a stream is torn, a
token is not accounted for, or a text differs from the offline one by more than rounding.
Expected: the 99th percentile of the gaps between tokens at most 4 medians.

throughput: tokens a second of 16 requests at a time against an engine in this process, in turn.
Expected: the median of the ratios at least 0.7 on the pair that ships, 0.9 at 0.4B.

    python benchmarks/serving.py soak [--target T --draft D] [--minutes 10]
    python benchmarks/serving.py throughput [--target T --draft D]
"""

from __future__ import annotations

import argparse
import asyncio
import re
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from itertools import islice
from statistics import median
from time import perf_counter, sleep
from typing import Any

from differences import Difference, Offline
from foretoken import Engine, Speculator, load
from foretoken.cli.connection import connected, get_bytes
from foretoken.cli.load import Load, Server, server
from foretoken.lab.load.arrivals import prompts
from foretoken.lab.load.counters import SAMPLE
from foretoken.lab.load.figures import latency
from machine import save
from server_process import foretoken, started
from streams import CONNECTIONS, Heard, Run, requests

POOL = 256  # distinct requests of a soak
AT_ONCE, ROUNDS, REQUESTS, LENGTH = 16, 5, 64, 64  # of a throughput; tokens of prompts and texts
COUNTING = 5.0  # seconds until the server has counted what it has sent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("soak", "throughput"))
    parser.add_argument("--target", help="left out: the pair that ships")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--minutes", type=float, default=10.0, help="of a soak")
    parser.add_argument("--requests", type=int, help="fewer than usual, to try it")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with started(foretoken(arguments.target, arguments.draft, arguments.dtype)) as process:
        service = server(process.url, None, None)
        result = (soak if arguments.what == "soak" else throughput)(service, arguments)
    name = "default-pair" if arguments.target is None else "pair"
    head = {"command": " ".join(sys.argv), "arguments": vars(arguments), "server": service.facts}
    faults: list[str] = []
    if arguments.what == "soak":
        result |= compared(result.pop("heard"), arguments)
        faults = [*result["faults"], *beyond(result["differences"])]
    print(save(f"serving-{arguments.what}-{name}-{arguments.dtype}", head | result))
    if faults:
        sys.exit("\n".join(faults))


def soak(service: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """The load and its figures; `heard` is still to be compared."""
    pool = requests(arguments.requests or POOL, service.facts["vocab_size"], arguments.seed)
    before = sums(service)
    run = Run(service.url, service.model, pool, 60 * arguments.minutes)
    seconds = asyncio.run(run.all())
    complete = [heard for heard in run.heard if not heard.failure]
    failures = Counter(heard.failure for heard in run.heard if heard.failure)
    tokens = sum(heard.completion_tokens for heard in complete)
    read = sum(heard.prompt_tokens for heard in complete)
    counted = settled(service, before, tokens)
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
            [g for heard in complete for t in heard.traces for g in t.gaps(counted=True)]
        ),
        "step_ms": spread(
            [g for heard in complete for t in heard.traces for g in t.gaps(counted=False)]
        ),
        "faults": faults,
        "heard": run.heard,
    }


def sums(service: Server) -> Counter[str]:
    """What the server has counted since it began."""
    with connected(service.url, service.key) as client:
        text = get_bytes(client, "/metrics").decode()
    totals: Counter[str] = Counter()
    for name, value in SAMPLE.findall(text):
        if re.fullmatch("foretoken_[a-z]+_tokens", name):
            totals[name.removeprefix("foretoken_")] += int(float(value))
    return totals


def settled(service: Server, before: Counter[str], tokens: int) -> Counter[str]:
    """What it has counted since `before`, which is so many tokens or soon will be."""
    end = perf_counter() + COUNTING
    while True:
        now = sums(service)
        now.subtract(before)
        if now["generation_tokens"] >= tokens or perf_counter() > end:
            return now
        sleep(0.05)


def at_a_time(heard: Sequence[Heard], seconds: float) -> float:
    """Streams that were open at a time, on average."""
    return sum(trace.end for one in heard for trace in one.traces) / seconds


def spread(seconds: Sequence[float | None]) -> dict[str, float] | None:
    """Median, 99th percentile, and the second over the first; None without values."""
    percentiles = latency(seconds, (50, 99))
    if percentiles is None:
        return None
    low, high = percentiles.percentiles[50], percentiles.percentiles[99]
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


def throughput(service: Server, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rounds of the same requests, at the server and in an engine here, in turn."""
    spec = load(arguments.target, arguments.draft, dtype=arguments.dtype)
    count, rounds = arguments.requests or REQUESTS, list[dict[str, float]]()
    for number in range(1 + ROUNDS):  # the first warms up
        seed = arguments.seed + number
        ids = [*islice(prompts(LENGTH, spec.target.vocab_size, seed), 1 + count)]
        rates = {"server": served(service, ids, seed), "offline": alone(spec, service, ids, seed)}
        rounds.append(rates | {"ratio": rates["server"] / rates["offline"]})
        print(rounds[-1], file=sys.stderr)
    speeds = {f"{name}_tokens_per_second": [each[name] for each in rounds[1:]] for name in rates}
    ratios = [each["ratio"] for each in rounds[1:]]
    shape = {"at_once": AT_ONCE, "requests": count, "prompt": LENGTH, "new": LENGTH}
    return {**shape, "ratio": median(ratios), "ratios": ratios, **speeds}


def served(service: Server, ids: list[list[int]], seed: int) -> float:
    """Tokens a second."""
    wishes = {"max_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    traffic = Load(service, ids, wishes, seed)
    seconds = traffic.run([0.0] * (len(ids) - 1), AT_ONCE, lambda trace: None)
    if failed := [trace.failure for trace in traffic.traces if trace.failure]:
        raise RuntimeError(f"{len(failed)} requests failed, the first by {failed[0]}")
    return sum(trace.tokens or 0 for trace in traffic.traces) / seconds


def alone(spec: Speculator, service: Server, ids: list[list[int]], seed: int) -> float:
    """The same of an engine, whose first request is no part of it either."""
    wishes: dict[str, Any] = {"max_new_tokens": LENGTH, "temperature": 0.0, "ignore_eos": True}
    with Engine(spec, service.facts["max_rows"]) as engine:
        for batch in (ids[:1], ids[1:]):
            start, tokens = perf_counter(), engine.stats().tokens
            for number, prompt in enumerate(batch):
                engine.add(prompt, seed=(seed + number, 0), **wishes)
            while engine.running or engine.waiting:
                engine.step()
        return (engine.stats().tokens - tokens) / (perf_counter() - start)


if __name__ == "__main__":
    main()
