"""Milliseconds of a model's passes on each CPU runtime and precision: by the tokens of one row, the
text before them, the rows of a batch, and for a prompt. Runtimes take turns; medians. The native
decoder may be held to an instruction set; beside it stands its floor: the bytes that a pass over
one token reads, at the pace at which this machine reads memory.

Expected (two cores, 0.14B): natively one token within 1.3 of its floor with AVX-512 and 1.4 with
AVX2, eight tokens 1.8 and 2.6 passes; 2,048 tokens before them 1.7 times 64; 16 rows 3.5 times one.

    python benchmarks/runtimes.py FILE.gguf native:int4 native:int4:avx2 transformers:float32
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Generator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import torch

import foretoken
import machine
from foretoken.kernels.library import INSTRUCTIONS_VARIABLE
from foretoken.measurement.machine import measure_bandwidth
from foretoken.timing import measure_seconds, take_turns

TOKENS, PASTS, BATCHES = (1, 2, 3, 4, 6, 8, 16), (64, 512, 2048), (1, 2, 4, 8, 16, 32)
ROUNDS = 7


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target")
    parser.add_argument("ways", nargs="+", help="RUNTIME:DTYPE, or native:DTYPE:INSTRUCTIONS")
    asked = parser.parse_args()
    models: dict[str, Any] = {}
    for way in asked.ways:
        runtime, dtype, *held = way.split(":")
        with instructions(*held):
            models[way] = foretoken.load(asked.target, "none", dtype=dtype, runtime=runtime).target
            models[way].start([text(8)])
            models[way].leave([0])
    floors = {way: floor(model) for way, model in models.items() if model.runtime == "native"}
    print({"floors": floors}, flush=True)
    torch.set_num_threads(1)  # as in a run
    rows: list[dict[str, Any]] = []

    def note(kind: str, past: int, size: int, made: Callable[[Any], None]) -> None:
        rows.append({"kind": kind, "past": past, "size": size, **timed(models, made)})
        print(rows[-1], flush=True)

    for past in PASTS:
        started(models, [text(past)])
        for n in TOKENS:
            note("tokens", past, n, lambda model, n=n, past=past: block(model, [n], [past]))
    started(models, [text(64)])
    for model in models.values():
        model.set_lengths([64])
    note("alternating 1 and 4", 64, 4, lambda model: both(model, 64))
    for B in BATCHES:
        started(models, [text(64 + b) for b in range(B)])
        pasts = [64 + b for b in range(B)]
        note("rows", 64, B, lambda model, pasts=pasts: block(model, [1] * len(pasts), pasts))
    started(models, [])
    for n in (32, 200, 1000):
        note("prompt", 0, n, lambda model, n=n: prompt(model, n))
    print(
        machine.save(
            "runtimes", {"target": Path(asked.target).name, "floors": floors, "milliseconds": rows}
        )
    )


@contextmanager
def instructions(name: str | None = None) -> Generator[None]:
    """Hold the native decoder to an instruction set meanwhile."""
    before = os.environ.pop(INSTRUCTIONS_VARIABLE, None)
    try:
        if name:
            os.environ[INSTRUCTIONS_VARIABLE] = name
        yield
    finally:
        os.environ.pop(INSTRUCTIONS_VARIABLE, None)
        if before:
            os.environ[INSTRUCTIONS_VARIABLE] = before


def floor(model: Any) -> float:
    """Milliseconds in which this machine reads what a pass over one token reads."""
    seconds, size = measure_bandwidth(torch.device("cpu"))
    return round(1e3 * seconds.median * model.passes.bytes[1] / size, 2)


def text(length: int) -> list[int]:
    return [(7 * i) % 900 + 10 for i in range(length)]


def started(models: dict[str, Any], prompts: list[list[int]]) -> None:
    for model in models.values():
        model.leave(list(range(len(model.lengths))))
        model.start(prompts)


def block(model: Any, counts: list[int], pasts: list[int]) -> None:
    model.score([[11] * n for n in counts], counts)
    model.set_lengths(pasts)


def both(model: Any, past: int) -> None:
    block(model, [1], [past])
    block(model, [4], [past])


def prompt(model: Any, length: int) -> None:
    model.start([text(length)])
    model.leave([0])


def timed(models: dict[str, Any], made: Callable[[Any], None]) -> dict[str, float]:
    """Milliseconds on each, the second of two at a time: the first finds its size anew."""

    def second(model: Any) -> float:
        made(model)
        return measure_seconds(partial(made, model))

    turns = {name: partial(second, model) for name, model in models.items()}
    rounds = list(take_turns(turns, ROUNDS, warm_up=0))
    return {name: round(1e3 * median(each[name] for each in rounds), 2) for name in models}


if __name__ == "__main__":
    main()
