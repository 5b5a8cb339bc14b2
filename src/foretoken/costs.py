"""What a step costs on one pair and one machine, in seconds, and the memory of it.

Measured from step records, then frozen: gamma follows from it, and no clock that runs while text
is made may have a say in the text. Kept on disk by what speed depends on: shapes, precision,
runtime, machine and versions, not the weights' values. Knows no engine and no policy.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Callable
from dataclasses import asdict, dataclass
from math import isfinite
from pathlib import Path
from statistics import median_low
from typing import Any, cast

import torch

from foretoken.request import StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.storage import disk
from foretoken.storage.lineage import versions

FILE, FORMAT = "costs.json", 3
TICK = 1e-9  # seconds: no pass takes less, whatever a coarse clock says

Table = tuple[tuple[int, float], ...]  # ascending; between and beyond its points it is straight


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of a step's three parts, and how likely its guesses are to be kept at first."""

    draft: Table  # of so many guesses for one row
    score: Table  # of the target's pass over so many tokens, those of all rows
    verify: Table  # of what follows the pass, by the same tokens
    rows: Table = ((1, 1.0),)  # a draft for so many rows, against one for one row
    prior: tuple[float, float] = (3.0, 0.8)  # alpha expected of a new row; worth so many guesses

    def seconds(self, gamma: int, rows: int = 1) -> float:
        """A step in which each of `rows` rows makes `gamma` guesses."""
        n = rows * (gamma + 1)
        drafting = at(self.draft, gamma) * at(self.rows, rows)
        return drafting + at(self.score, n) + at(self.verify, n)

    @property
    def c(self) -> float:
        """T_q / T_p (Definition 3.7), T_q from the longest draft; 0 where none was measured."""
        most, seconds = self.draft[-1]
        return seconds / most / at(self.score, 1) if most else 0.0

    def v(self, n: int) -> float:
        """A pass over n tokens and what follows it, against those of plain decoding."""
        one = at(self.score, 1) + at(self.verify, 1)
        return (at(self.score, n) + at(self.verify, n)) / one

    def among(self, steps: list[StepRecord], rows: int) -> Costs:
        """These costs, with what steps of `rows` equal rows add to them."""
        shared = of(steps, rows)
        most, seconds = shared.draft[-1]
        alone = at(self.draft, most)
        ratio = max(1.0, seconds / alone) if most and alone > 0 else 1.0
        return Costs(
            self.draft,
            tuple(sorted((dict(self.score) | dict(shared.score)).items())),
            tuple(sorted((dict(self.verify) | dict(shared.verify)).items())),
            ((1, 1.0), (rows, ratio)),
            self.prior,
        )


def of(steps: list[StepRecord], rows: int = 1) -> Costs:
    """Costs from one row's steps, of which there must be some, in a batch of `rows` like it."""
    groups: dict[int, list[StepRecord]] = {}
    for step in steps:
        groups.setdefault(step.drafted, []).append(step)

    def table(name: str, size: Callable[[int], int]) -> Table:
        return tuple(
            (size(n), median_low(getattr(step, name) for step in groups[n])) for n in sorted(groups)
        )

    score = table("score_seconds", lambda n: rows * (n + 1))
    return Costs(
        draft=table("draft_seconds", lambda n: n),
        score=tuple((n, max(seconds, TICK)) for n, seconds in score),
        verify=table("verify_seconds", lambda n: rows * (n + 1)),
    )


def at(table: Table, x: int) -> float:
    """The table at x; beyond its ends it goes on as it last did, but never falls."""
    if len(table) == 1 or x <= table[0][0]:
        return table[0][1]
    i = next((i for i in range(1, len(table) - 1) if x <= table[i][0]), len(table) - 1)
    (a, low), (b, high) = table[i - 1], table[i]
    if x <= b:
        return low + (high - low) * (x - a) / (b - a)
    return high + max(0.0, high - low) * (x - b) / (b - a)


def kind(params: SamplingParams) -> str:
    """The kinds of sampling that cost differently."""
    if params.greedy:
        return "greedy"
    plain = (params.top_k, params.top_p, params.min_p) == (0, 1.0, 0.0)
    return "sampled" if plain else "truncated"


def key(target: object, drafter: object, *more: object) -> str | None:
    """The name under which costs are kept; None where a part cannot be told from others."""
    parts = [identity(target), identity(drafter)]
    if None in parts:
        return None
    found = json.dumps([FORMAT, *parts, *more, _machine(), versions()])
    return hashlib.sha256(found.encode()).hexdigest()


def identity(part: Any) -> str | None:
    """What a model's or drafter's speed follows from: its own `identity`, else its config.

    None for what has no name: a network in memory may differ from its config, and a stranger's
    drafter from its class.
    """
    own = getattr(part, "identity", None)
    if isinstance(own, str):
        return own
    if getattr(part, "singular", False):  # made of parts, or with settings of its own
        return None
    network = getattr(part, "model", None)
    if network is None:
        ours = type(part).__module__.startswith("foretoken.drafters.")
        return type(part).__qualname__ if ours else None
    if not getattr(network, "name_or_path", None):
        return identity(network)
    config = {k: v for k, v in network.config.to_dict().items() if k != "_name_or_path"}
    facts = [type(network).__qualname__, network.dtype, part.device, part.runtime, config]
    return json.dumps(facts, sort_keys=True, default=str)


def recall(name: str) -> Costs | None:
    """What was kept under that name; None where nothing was, or it is broken."""
    found = disk.remembered(FILE).get(name)
    try:
        parts = dict(cast(dict[str, Any], found))
        worth, alpha = map(float, parts.pop("prior"))
        if not (worth > 0 and 0 <= alpha <= 1):
            return None
        kept = Costs(**{name: _table(part) for name, part in parts.items()}, prior=(worth, alpha))
        # rates are divided by what a pass takes, and no pass takes no time
        return kept if all(value > 0 for _, value in (*kept.score, *kept.rows)) else None
    except (AttributeError, KeyError, OverflowError, TypeError, ValueError):
        return None


def keep(name: str, costs: Costs) -> None:
    disk.remember(FILE, name, asdict(costs))


def _table(points: Any) -> Table:
    table = tuple((int(n), float(value)) for n, value in points)
    rising = all(a < b for (a, _), (b, _) in zip(table, table[1:], strict=False))
    if not table or not rising or not all(isfinite(v) and v >= 0 for _, v in table):
        raise ValueError("no table of costs")
    return table


def _machine() -> list[Any]:
    """What passes run on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return [sorted(names) or platform.processor(), cores, torch.get_num_threads(), gpu]
