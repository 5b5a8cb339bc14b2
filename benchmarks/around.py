"""What a step of one text takes around the models' forward passes: its time by part, without what
runs inside the native decoder.

Each part is timed by a wrapper around its function, its own time alone: what it calls counts as the
part that this belongs to. Behind a forward pass the caches hold weights, so the same code takes
several times as long as in a loop of its own.

Goal: at most 0.25 ms a step at temperature 0, and 0.6 ms at 1 with V = 49,152.

    python benchmarks/around.py default                       # the pair that ships
    python benchmarks/around.py smollm2 --target FILE --draft self:int4 --dtype int8
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table
from torch.overrides import TorchFunctionMode

from foretoken import Speculator, load
from foretoken import step as step_module
from foretoken.engine.batch import Batch
from foretoken.engine.core import EngineCore
from foretoken.engine.scheduler import Scheduler
from foretoken.kernels.library import OpenNetwork
from machine import save

PROMPTS = (
    "The captain looked at the sea and",
    "The old house stood at the end of the lane, and",
    "It was a cold morning, and the doctor",
)
PASS = "passes"  # inside the models: no part of what is around
PARTS = (PASS, "draft", "score", "verify", "commit", "records", "choice", "batch", "scheduler")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="of the results file")
    parser.add_argument("--target", help="left out: the pair that ships")
    parser.add_argument("--draft")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--tokens", type=int, default=96, help="of a text")
    parser.add_argument("--gamma", type=int, nargs="*", default=[0, 4])
    parser.add_argument("--turns", type=int, default=3)
    arguments = parser.parse_args()
    spec = load(arguments.target, arguments.draft, dtype=arguments.dtype)
    settings = [(t, g) for t in (0.0, 1.0) for g in (*arguments.gamma, None)]
    clock, steps = Clock(), defaultdict[tuple[float, int | None], list[dict[str, float]]](list)
    clock.watch(type(spec.drafter))
    for turn in range(arguments.turns + 1):
        for setting in settings:
            made = texts(spec, clock, *setting, arguments.tokens)
            steps[setting] += made if turn else []  # the first turn measures costs
    rows = [row(spec, t, g, steps[t, g], arguments.tokens) for t, g in settings]
    facts = {name: getattr(arguments, name) for name in ("target", "draft", "dtype", "tokens")}
    facts["target"] = arguments.target and Path(arguments.target).name
    facts |= {"vocabulary": spec.target.vocab_size, "flags": flags(), "rows": rows}
    print(save(f"around-{arguments.name}", facts))
    show(rows)


class Clock:
    """The own time of each part of the steps that are taken."""

    def __init__(self) -> None:
        self.steps: list[dict[str, float]] = []
        self._stack: list[str] = []
        self._since = 0.0

    def watch(self, drafter: type) -> None:
        """Time all parts, from now on."""
        self._wrap(OpenNetwork, "run", PASS)
        self._wrap(OpenNetwork, "chain", PASS)
        self._wrap(drafter, "propose", "draft")
        self._wrap(step_module, "_score", "score")
        self._wrap(step_module, "_verify_on_host", "verify")
        self._wrap(step_module, "_verify_by_tensors", "verify")
        self._wrap(step_module, "_commit", "commit")
        self._wrap(step_module, "_commit_to_models", "commit")
        self._wrap(step_module, "_make_record", "records")
        self._wrap(Scheduler, "_gamma", "choice")
        self._wrap(Batch, "step", "batch")
        self._wrap(EngineCore, "_step", "scheduler", whole=True)

    def _wrap(self, owner: Any, name: str, part: str, *, whole: bool = False) -> None:
        own: Callable[..., Any] = getattr(owner, name)

        def timed(*arguments: Any, **options: Any) -> Any:
            if whole:
                self.steps.append(dict.fromkeys(PARTS, 0.0))
            self._turn()
            self._stack.append(part)
            try:
                return own(*arguments, **options)
            finally:
                self._turn()
                self._stack.pop()

        setattr(owner, name, timed)

    def _turn(self) -> None:
        """What has passed since the last turn is the running part's."""
        now = perf_counter()
        if self._stack and self.steps:
            self.steps[-1][self._stack[-1]] += now - self._since
        self._since = now


def texts(
    spec: Speculator, clock: Clock, temperature: float, gamma: int | None, tokens: int
) -> list[dict[str, float]]:
    """The parts of the steps of some texts, in seconds; without each text's first two, which read
    its prompt."""
    steps: list[dict[str, float]] = []
    for seed, prompt in enumerate(PROMPTS):
        options: dict[str, Any] = {"max_new_tokens": tokens, "gamma": gamma, "ignore_eos": True}
        clock.steps.clear()
        spec.generate(prompt, temperature=temperature, seed=seed, **options)
        steps += clock.steps[2:-1]
    return steps


class Calls(TorchFunctionMode):
    """Counts calls of torch from Python."""

    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


def row(
    spec: Speculator,
    temperature: float,
    gamma: int | None,
    steps: list[dict[str, float]],
    tokens: int,
) -> dict[str, Any]:
    """Milliseconds of each part, medians over steps, and torch calls a step."""
    options: dict[str, Any] = {"max_new_tokens": tokens, "gamma": gamma, "ignore_eos": True}
    with Calls() as calls:
        (out,) = spec.generate(PROMPTS[0], temperature=temperature, **options)
    parts = {part: 1e3 * median(step[part] for step in steps) for part in PARTS}
    around = 1e3 * median(sum(step.values()) - step[PASS] for step in steps)
    return {
        "temperature": temperature,
        "gamma": gamma,
        "steps": len(steps),
        "torch calls": round(calls.count / len(out.steps)),
        "around": round(around, 4),
        **{part: round(value, 4) for part, value in parts.items()},
    }


def flags() -> list[str]:
    """What the processor can do that products are made of."""
    with open("/proc/cpuinfo") as file:
        line = next((line for line in file if line.startswith("flags")), "")
    return [flag for flag in line.split() if flag.startswith(("avx", "amx", "fma"))]


def show(rows: list[dict[str, Any]]) -> None:
    table = Table(*rows[0])
    for each in rows:
        table.add_row(*(f"{x:.3f}" if isinstance(x, float) else str(x) for x in each.values()))
    Console(width=160).print(table)


if __name__ == "__main__":
    main()
