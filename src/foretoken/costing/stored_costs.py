"""Costs on disk: how reliable they are, and when they are measured again.

The key of stored costs contains everything that speed depends on: shapes, precision, backend,
machine and versions, but not the values of the weights. Costs are stored even if the machine was
busy. Costs that real steps contradict are used until another process measures again before its
first request. Each wait before a further measurement is four times as long as the wait before, so
that a machine that is never idle does not measure at every start.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from pathlib import Path
from statistics import median
from time import time
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

from foretoken.costing.costs import Costs, interpolate
from foretoken.drafters.base import Drafter
from foretoken.kernels.library import INSTRUCTIONS_VARIABLE
from foretoken.models.base import Component
from foretoken.records import StepRecord
from foretoken.storage.cache import get_versions, load_cached_values, save_cached_value

COSTS_FILE, COSTS_FORMAT = "costs.json", 12
FIRST_RETRY_SECONDS, RETRY_BACKOFF, MAX_RETRY_SECONDS = 600.0, 4, 7 * 86400.0
MAX_COST_RATIO = 1.5  # of real to expected step time; changes of other load cause less
# minimum number of steps of one size to compare; maximum number, of which the newest are compared
MIN_MONITORED_STEPS, MAX_MONITORED_STEPS = 16, 256


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """Costs, and the circumstances of their measurement."""

    costs: Costs
    spread: float | None  # ratio of times of odd and even rounds, 1 or more; None: one round only
    others: float | None  # share of the processors that other processes used; None: unknown
    label: str = ""  # for `foretoken cache list`
    when: float = field(default_factory=lambda: time())  # last measurement, seconds since 1970
    attempts: int = 1
    off: float | None = None  # the factor by which later steps differ from the costs

    @property
    def trust(self) -> str:
        """A description of how reliable the costs are, for lists."""
        spread = "one round" if self.spread is None else f"rounds within {self.spread:.2f}x"
        others = (
            "" if self.others is None else f", other processes took {self.others:.0%} of the CPU"
        )
        off = "" if self.off is None else f", later steps differ {self.off:.1f}x"
        return f"{spread}{others}{off}{'; a later start measures again' if off else ''}"

    def is_due(self, single_costs: StoredCosts | None = None) -> bool:
        """Return whether to measure again. `single_costs` are the costs for batch size 1 that these
        costs extend, if any."""
        if single_costs is not None and single_costs.when > self.when:
            return True
        wait = min(
            MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * RETRY_BACKOFF ** min(self.attempts - 1, 9)
        )
        return self.off is not None and abs(time() - self.when) >= wait


class DriftMonitor:
    """Compares real steps at batch size 1 with the costs of one kind of sampling."""

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = {}  # real / expected time, by draft tokens
        self._exceeded: bool | None = None

    def add_steps(self, steps: list[StepRecord], costs: Costs) -> bool:
        """Add steps. Return True if these steps change the verdict on the costs: the costs are
        wrong if `off` exceeds `MAX_COST_RATIO`."""
        before = 0
        for step in steps:
            positions = 1 + step.drafted + step.padding
            if step.rows == 1 and positions == before:  # after another size, a pass is slow
                newest = deque[float](maxlen=MAX_MONITORED_STEPS)
                self._ratios.setdefault(step.drafted, newest).append(_compare_seconds(step, costs))
            before = positions if step.rows == 1 else 0
        was_exceeded, factor = self._exceeded, self.off
        self._exceeded = None if factor is None else factor > MAX_COST_RATIO
        return self._exceeded != was_exceeded

    @property
    def off(self) -> float | None:
        """The factor by which the costs are wrong; None after too few steps.

        For each size of steps there is a ratio of real to expected time. The factor is the greatest
        ratio divided by the smallest ratio; or, if larger, the factor by which even the slowest
        size is faster than expected. If all sizes are slower by the same factor, the machine is
        only busy, and `off` is near 1.
        """
        ratios = [
            median(each) for each in self._ratios.values() if len(each) >= MIN_MONITORED_STEPS
        ]
        return max(max(ratios) / min(ratios), 1 / max(ratios)) if ratios else None


def _compare_seconds(step: StepRecord, costs: Costs) -> float:
    """Return the ratio of a step's time to its expected time."""
    drafting = 0.0 if step.predicted else interpolate(costs.draft, step.drafted)
    expected = drafting + costs.target_seconds(1 + step.drafted + step.padding, 1 + step.drafted)
    took = step.draft_seconds + step.score_seconds + step.verify_seconds
    return max(took, 1e-9) / float(expected)


def store_contradiction(name: str, costs: Costs, off: float) -> None:
    """With the costs stored under `name`, store `off`, the factor by which real steps differ from
    these costs; store None if `off` is at most `MAX_COST_RATIO`."""
    stored, wrong = load_costs(name), off if off > MAX_COST_RATIO else None
    if stored is not None and stored.costs == costs and (stored.off is None) != (wrong is None):
        store_costs(name, replace(stored, off=wrong))


def load_or_measure(
    name: str | None,
    single_name: str | None,
    measure: Callable[[], StoredCosts],
    *,
    remeasure: bool,
) -> Costs:
    """Return the costs stored under `name`, or measure and store them if `find_usable` has none."""
    costs = find_usable(name, single_name, remeasure=remeasure)
    if costs is not None:
        return costs
    new, stored = measure(), load_costs(name) if name else None
    if name:
        store_costs(name, new if stored is None else replace(new, attempts=stored.attempts + 1))
    return new.costs


def find_usable(name: str | None, single_name: str | None, *, remeasure: bool) -> Costs | None:
    """Return the costs stored under `name`; None if there are none, or if they are due to be
    measured again and `remeasure` allows it. `single_name` is the name of the costs for batch size
    1 that these costs extend."""
    stored = load_costs(name) if name else None
    due = (
        remeasure
        and stored is not None
        and stored.is_due(load_costs(single_name) if single_name else None)
    )
    return None if stored is None or due else stored.costs


def load_costs(name: str) -> StoredCosts | None:
    """Return the costs stored under `name`; None if there are none or they are invalid."""
    return _parse_entry(load_cached_values(COSTS_FILE).get(name))


def store_costs(name: str, costs: StoredCosts) -> None:
    save_cached_value(COSTS_FILE, name, asdict(costs))


def list_entries() -> list[StoredCosts]:
    """Return all stored costs, the newest first."""
    every = (_parse_entry(entry) for entry in load_cached_values(COSTS_FILE).values())
    return sorted((entry for entry in every if entry), key=lambda entry: -entry.when)


@cache
def _make_adapter() -> TypeAdapter[StoredCosts]:
    return TypeAdapter(StoredCosts)


def _parse_entry(entry: Any) -> StoredCosts | None:
    try:
        stored = _make_adapter().validate_python(entry)
    except ValidationError:
        return None
    return stored if stored.costs.is_valid else None


def make_key(target: Component, drafter: Component, *more: object) -> str | None:
    """Return the key of a pair's costs on disk, which also depends on `more`: the kind of sampling
    and the batch size. None if the target or the drafter has no identity."""
    parts = [make_identity(target), make_identity(drafter)]
    if None in parts:
        return None
    content = json.dumps([COSTS_FORMAT, *parts, *more, describe_machine(), get_versions()])
    return hashlib.sha256(content.encode()).hexdigest()


def make_identity(part: Any) -> str | None:
    """Return a string that determines a model's or drafter's speed: its `identity`, else its
    config. None if its speed is unknown: a model that was built in memory may differ from its
    config, and a user's drafter may have settings."""
    if isinstance(part, Drafter):
        if part.identity is not None or part.has_own_speed:  # it has parts or settings
            return part.identity
        if part.model is not None:
            return make_identity(part.model)
        built_in = type(part).__module__.startswith("foretoken.drafters.")
        return type(part).__qualname__ if built_in else None
    if part.identity is not None:
        return part.identity
    network: Any = None if part.has_own_speed else part.model
    if isinstance(network, Component):
        return make_identity(network)
    if not getattr(network, "name_or_path", None):
        return None
    config = {k: v for k, v in network.config.to_dict().items() if k != "_name_or_path"}
    facts = [type(network).__qualname__, network.dtype, part.device, part.runtime, config]
    return json.dumps(facts, sort_keys=True, default=str)


def describe_machine() -> list[Any]:
    """Return the hardware properties that speed depends on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    forced_choice = os.environ.get(INSTRUCTIONS_VARIABLE)  # an instruction set, maybe a slower one
    return [
        sorted(names) or platform.processor(),
        cores,
        torch.get_num_threads(),
        gpu,
        forced_choice,
    ]
