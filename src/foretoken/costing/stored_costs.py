"""Costs on disk: how far they can be trusted, and when they are measured again.

Kept whatever the machine did meanwhile, by what speed depends on: shapes, precision, runtime,
machine and versions, not the weights' values. Costs that real steps contradict serve until another
process measures them again, before its first text; it waits four times as long for each next
attempt, so a machine that is never idle does not pay for its costs at every start.
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

COSTS_FILE, COSTS_FORMAT = "costs.json", 11
FIRST_RETRY_SECONDS, RETRY_BACKOFF, MAX_RETRY_SECONDS = (
    600.0,
    4,
    7 * 86400.0,
)  # seconds to the next attempt: first, times, at most
MAX_COST_RATIO = (
    1.5  # between real steps and costs: a neighbour that comes or goes during a run is no reason
)
MIN_MONITORED_STEPS, MAX_MONITORED_STEPS = (
    16,
    256,
)  # steps of a size that tell, at least and at most: the newest


@dataclass(frozen=True, slots=True)
class StoredCosts:
    """Costs, and the circumstances of their measurement."""

    costs: Costs
    spread: float | None  # the ratio of its two halves; None where there were none
    others: float | None  # the share of the processors that others took meanwhile; None: unknown
    label: str = ""  # for `foretoken cache list`
    when: float = field(default_factory=lambda: time())  # of the last attempt, since 1970
    attempts: int = 1
    off: float | None = None  # the factor by which later steps contradict them

    @property
    def trust(self) -> str:
        """Say how far the costs can be trusted."""
        halves = "measured once" if self.spread is None else f"halves {self.spread:.2f} times apart"
        others = "" if self.others is None else f", others took {self.others:.0%} of the processors"
        off = "" if self.off is None else f", {self.off:.1f} times off in later steps"
        return f"{halves}{others}{off}{'; measured again by a later start' if off else ''}"

    def is_due(self, single_costs: StoredCosts | None = None) -> bool:
        """Tell whether to measure again. alone: the costs of one row, which these extend."""
        if single_costs is not None and single_costs.when > self.when:
            return True
        wait = min(
            MAX_RETRY_SECONDS, FIRST_RETRY_SECONDS * RETRY_BACKOFF ** min(self.attempts - 1, 9)
        )
        return self.off is not None and abs(time() - self.when) >= wait


class DriftMonitor:
    """Real steps of single rows against the costs of one kind of sampling."""

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = {}  # of what steps took, by their draft tokens
        self._exceeded: bool | None = None

    def add_steps(self, steps: list[StepRecord], costs: Costs) -> bool:
        """Note steps; tell whether they change the trust in the costs."""
        before = 0
        for step in steps:
            positions = 1 + step.drafted + step.padding
            if step.rows == 1 and positions == before:  # the pass of another size takes longer
                newest = deque[float](maxlen=MAX_MONITORED_STEPS)
                self._ratios.setdefault(step.drafted, newest).append(_compare_seconds(step, costs))
            before = positions if step.rows == 1 else 0
        was_exceeded, factor = self._exceeded, self.off
        self._exceeded = None if factor is None else factor > MAX_COST_RATIO
        return self._exceeded != was_exceeded

    @property
    def off(self) -> float | None:
        """The factor by which the costs are wrong: of steps of one size against those of another,
        or of all, if they take less than they should. Steps that all take longer say that this
        machine is busy now. None where too few are known."""
        ratios = [
            median(each) for each in self._ratios.values() if len(each) >= MIN_MONITORED_STEPS
        ]
        return max(max(ratios) / min(ratios), 1 / max(ratios)) if ratios else None


def _compare_seconds(step: StepRecord, costs: Costs) -> float:
    """Return a step's time over its expected time."""
    drafting = 0.0 if step.predicted else interpolate(costs.draft, step.drafted)
    expected = drafting + costs.target_seconds(1 + step.drafted + step.padding, 1 + step.drafted)
    took = step.draft_seconds + step.score_seconds + step.verify_seconds
    return max(took, 1e-9) / float(expected)


def store_contradiction(name: str, costs: Costs, off: float) -> None:
    """Keep beside these costs what real steps say of them."""
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
    """The costs under `name`, measured where `find_usable` does not have them."""
    costs = find_usable(name, single_name, remeasure=remeasure)
    if costs is not None:
        return costs
    new, stored = measure(), load_costs(name) if name else None
    if name:
        store_costs(name, new if stored is None else replace(new, attempts=stored.attempts + 1))
    return new.costs


def find_usable(name: str | None, single_name: str | None, *, remeasure: bool) -> Costs | None:
    """The costs kept under `name`; None where there are none, or where they are due and `again`
    says that this process may measure them. alone: the name of those that they extend."""
    stored = load_costs(name) if name else None
    due = (
        remeasure
        and stored is not None
        and stored.is_due(load_costs(single_name) if single_name else None)
    )
    return None if stored is None or due else stored.costs


def load_costs(name: str) -> StoredCosts | None:
    """Return the costs stored under `name`; None where there are none, or they are broken."""
    return _parse_entry(load_cached_values(COSTS_FILE).get(name))


def store_costs(name: str, costs: StoredCosts) -> None:
    save_cached_value(COSTS_FILE, name, asdict(costs))


def list_entries() -> list[StoredCosts]:
    """All that is kept, the newest first."""
    every = (_parse_entry(entry) for entry in load_cached_values(COSTS_FILE).values())
    return sorted((kept for kept in every if kept), key=lambda kept: -kept.when)


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
    """The key under which costs are kept; None for a model or drafter without an identity."""
    parts = [make_identity(target), make_identity(drafter)]
    if None in parts:
        return None
    content = json.dumps([COSTS_FORMAT, *parts, *more, describe_machine(), get_versions()])
    return hashlib.sha256(content.encode()).hexdigest()


def make_identity(part: Any) -> str | None:
    """Return a string that determines a model's or drafter's speed: its own `identity`, else its
    config.

    None where that is unknown: a network in memory may differ from its config, and a drafter of
    the user's own from its class.
    """
    if isinstance(part, Drafter):
        if (
            part.identity is not None or part.has_own_speed
        ):  # made of parts, or with settings of its own
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
    """The hardware that passes run on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    forced_choice = os.environ.get(
        INSTRUCTIONS_VARIABLE
    )  # to an instruction set that may be slower
    return [
        sorted(names) or platform.processor(),
        cores,
        torch.get_num_threads(),
        gpu,
        forced_choice,
    ]
