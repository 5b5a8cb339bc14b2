"""Compares a fleet on paper with a real one: simulated and run at the same arrivals; as JSON.

Each replica is a process with an engine and one thread; requests are the measured prompts, sent
when they are due to the replica with the fewest that are not done. Expected: p50, p99 and
throughput within 15 % at 1 and 2 replicas.

    OMP_NUM_THREADS=1 python -m reproduction.fleet_check ONE.json TWO.json --load 0.5 --load 0.8

The files are of `python -m reproduction costs --rows 8 --out`, made on this machine with one
thread: for one replica, and beside another such measurement for two, which share it. A load is a
share of the capacity that is simulated.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import sys
from dataclasses import asdict, dataclass, replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np

from foretoken import Engine, SamplingParams
from foretoken.cli import prompts as prompt_files
from reproduction.costs import FleetCosts, load
from reproduction.fleet import PaperFleet, Simulated, arrivals, capacity, like, simulate

WARM = 8  # requests before those that are timed


@dataclass(slots=True)
class Sent:
    """A request; in seconds since the first was due."""

    due: float
    replica: int = -1
    first: float = 0.0
    ended: float = 0.0
    tokens: int = 0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("measurements", type=Path, nargs="+")
    parser.add_argument("--load", type=float, action="append", help="left out: 0.5 and 0.8")
    parser.add_argument("--requests", type=int, default=400)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if os.environ.get("OMP_NUM_THREADS") != "1":
        parser.error("set OMP_NUM_THREADS=1: a replica has one thread")
    results: list[dict[str, Any]] = []
    for replicas, path in enumerate(arguments.measurements, 1):
        measurement = load(path)
        fleet = PaperFleet(replicas, arguments.requests, seed=arguments.seed)
        for share in arguments.load or [0.5, 0.8]:
            results.append(compared(measurement, fleet, share))
            print(line(results[-1]), file=sys.stderr)
    print(json.dumps({"command": " ".join(sys.argv), "runs": results}, indent=2))


def compared(measurement: FleetCosts, fleet: PaperFleet, share: float) -> dict[str, Any]:
    """Predicted and measured figures of one load, and their ratios."""
    most = capacity(measurement, fleet)
    rate = share * most
    paper = predicted(simulate(measurement, fleet, rate, capacity=most))
    real = run(measurement, fleet, rate)
    ratios = {key: paper[key] / real[key] for key in paper}
    head = {"replicas": fleet.replicas, "load": share, "rate": rate, "fleet": asdict(fleet)}
    return {**head, "predicted": paper, "measured": real, "ratios": ratios}


def predicted(simulated: Simulated) -> dict[str, float]:
    assert simulated.first_token is not None and simulated.whole is not None
    return {
        "ttft_p50": simulated.first_token["p50"],
        "ttft_p99": simulated.first_token["p99"],
        "latency_p50": simulated.whole["p50"],
        "latency_p99": simulated.whole["p99"],
        "tokens_per_second": simulated.tokens_per_second,
    }


def line(result: dict[str, Any]) -> str:
    """Predicted / measured = ratio, of every figure."""
    parts = [
        f"{key} {result['predicted'][key]:.4g} / {result['measured'][key]:.4g} = {ratio:.2f}"
        for key, ratio in result["ratios"].items()
    ]
    head = f"{result['replicas']} replicas at {result['load']:g} of capacity"
    return f"{head}, {result['rate']:.3g} requests/s: {'; '.join(parts)}"


def run(measurement: FleetCosts, fleet: PaperFleet, rate: float) -> dict[str, float]:
    """The same fleet of processes."""
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(fleet.replicas)]
    workers = [
        context.Process(target=replica, args=(measurement, child_end), daemon=True)
        for _, child_end in pipes
    ]
    for worker, (_, child_end) in zip(workers, pipes, strict=True):
        worker.start()
        child_end.close()  # so that a worker that ends is an EOFError here
    try:
        return dispatched(measurement, fleet, rate, [own_end for own_end, _ in pipes])
    finally:
        for worker in workers:
            worker.terminate()
            worker.join()


def dispatched(
    measurement: FleetCosts, fleet: PaperFleet, rate: float, pipes: list[Connection]
) -> dict[str, float]:
    """Send every request when it is due, and gather what is told of it."""
    for pipe in pipes:
        pipe.recv()  # it is loaded and warm
    texts = like(measurement, fleet.requests, fleet.seed)
    limits = [len(measurement.texts[i].betas) for i in texts]
    sent = [Sent(due) for due in arrivals(fleet.requests, rate, fleet.seed)]
    start, following = perf_counter(), 0
    while any(not one.ended for one in sent):
        now = perf_counter() - start
        while following < len(sent) and sent[following].due <= now:
            one = sent[following]
            busy = [sum(s.replica == i and not s.ended for s in sent) for i in range(len(pipes))]
            one.replica = min(range(len(pipes)), key=busy.__getitem__)
            pipes[one.replica].send((following, texts[following], limits[following]))
            following += 1
        seconds_left = sent[following].due - now if following < len(sent) else None
        for pipe in wait(pipes, None if seconds_left is None else max(0.0, seconds_left)):
            assert isinstance(pipe, Connection)
            number, first, end, tokens = pipe.recv()
            one = sent[number]
            one.first, one.ended, one.tokens = first - start, end - start, tokens
    return figures(sent)


def figures(sent: list[Sent]) -> dict[str, float]:
    first = np.percentile([one.first - one.due for one in sent], (50, 99))
    latencies = np.percentile([one.ended - one.due for one in sent], (50, 99))
    span = max(one.ended for one in sent) - sent[0].due
    return {
        "ttft_p50": float(first[0]),
        "ttft_p99": float(first[1]),
        "latency_p50": float(latencies[0]),
        "latency_p99": float(latencies[1]),
        "tokens_per_second": sum(one.tokens for one in sent) / span,
    }


def replica(measurement: FleetCosts, pipe: Connection) -> None:
    """An engine that takes requests as they come and tells when their first and last tokens came,
    by the clock that all processes share."""
    spec, texts = loaded(measurement)
    params = SamplingParams(measurement.temperature, max_new_tokens=16)
    with Engine(spec, measurement.serving.rows, prefix_cache=False) as engine:
        for number in range(WARM):
            engine.add(texts[number % len(texts)], params, seed=number)
        while engine.running or engine.waiting:
            engine.step()
        pipe.send("ready")
        numbers: dict[int, int] = {}
        firsts: dict[int, float] = {}
        while True:
            idle = not (engine.running or engine.waiting)
            while pipe.poll(None if idle else 0.0):
                number, text, limit = pipe.recv()
                own = replace(params, max_new_tokens=limit, ignore_eos=True)
                numbers[engine.add(texts[text], own, seed=number)] = number
                idle = False
            for event in engine.step():
                now = perf_counter()
                if event.tokens:
                    firsts.setdefault(event.id, now)
                if event.completion is not None:
                    tokens = len(event.completion.tokens)
                    pipe.send((numbers[event.id], firsts.pop(event.id, now), now, tokens))


def loaded(measurement: FleetCosts) -> tuple[Any, list[Any]]:
    """The pair as it was measured, and its prompts."""
    from foretoken import load as load_pair

    spec = load_pair(measurement.target, measurement.draft)
    lines = prompt_files.read_prompts(None, Path(measurement.prompts))[: len(measurement.texts)]
    return spec, [prompt_files.to_model_prompt(each, spec) for each in lines]


if __name__ == "__main__":
    main()
