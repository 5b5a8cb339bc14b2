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

from foretoken.costing.costs import Costs, at
from foretoken.drafters.base import Drafter
from foretoken.kernels.library import INSTRUCTIONS_VARIABLE
from foretoken.models.base import Component
from foretoken.records import StepRecord
from foretoken.storage.cache import save_cached_value, load_cached_values, get_versions

FILE, FORMAT = "costs.json", 11
WAIT, LONGER, LONGEST = 600.0, 4, 7 * 86400.0  # seconds to the next attempt: first, times, at most
FAR = 1.5  # between real steps and costs: a neighbour that comes or goes during a run is no reason
MANY, WINDOW = 16, 256  # steps of a size that tell, at least and at most: the newest


@dataclass(frozen=True, slots=True)
class Kept:
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

    def due(self, alone: Kept | None = None) -> bool:
        """Tell whether to measure again. alone: the costs of one row, which these extend."""
        if alone is not None and alone.when > self.when:
            return True
        wait = min(LONGEST, WAIT * LONGER ** min(self.attempts - 1, 9))
        return self.off is not None and abs(time() - self.when) >= wait


class Watch:
    """Real steps of single rows against the costs of one kind of sampling."""

    def __init__(self) -> None:
        self._ratios: dict[int, deque[float]] = {}  # of what steps took, by their draft tokens
        self._told: bool | None = None

    def see(self, steps: list[StepRecord], costs: Costs) -> bool:
        """Note steps; tell whether they change the trust in the costs."""
        before = 0
        for step in steps:
            positions = 1 + step.drafted + step.padding
            if step.rows == 1 and positions == before:  # the pass of another size takes longer
                newest = deque[float](maxlen=WINDOW)
                self._ratios.setdefault(step.drafted, newest).append(_ratio(step, costs))
            before = positions if step.rows == 1 else 0
        before_told, factor = self._told, self.off
        self._told = None if factor is None else factor > FAR
        return self._told != before_told

    @property
    def off(self) -> float | None:
        """The factor by which the costs are wrong: of steps of one size against those of another,
        or of all, if they take less than they should. Steps that all take longer say that this
        machine is busy now. None where too few are known."""
        ratios = [median(each) for each in self._ratios.values() if len(each) >= MANY]
        return max(max(ratios) / min(ratios), 1 / max(ratios)) if ratios else None


def _ratio(step: StepRecord, costs: Costs) -> float:
    """Return a step's time over its expected time."""
    drafting = 0.0 if step.predicted else at(costs.draft, step.drafted)
    expected = drafting + costs.passing(1 + step.drafted + step.padding, 1 + step.drafted)
    took = step.draft_seconds + step.score_seconds + step.verify_seconds
    return max(took, 1e-9) / float(expected)


def contradict(name: str, costs: Costs, off: float) -> None:
    """Keep beside these costs what real steps say of them."""
    kept, wrong = recall(name), off if off > FAR else None
    if kept is not None and kept.costs == costs and (kept.off is None) != (wrong is None):
        keep(name, replace(kept, off=wrong))


def recalled(
    name: str | None, alone: str | None, measure: Callable[[], Kept], *, again: bool
) -> Costs:
    """The costs under `name`, measured where `known` does not have them."""
    costs = known(name, alone, again=again)
    if costs is not None:
        return costs
    new, kept = measure(), recall(name) if name else None
    if name:
        keep(name, new if kept is None else replace(new, attempts=kept.attempts + 1))
    return new.costs


def known(name: str | None, alone: str | None, *, again: bool) -> Costs | None:
    """The costs kept under `name`; None where there are none, or where they are due and `again`
    says that this process may measure them. alone: the name of those that they extend."""
    kept = recall(name) if name else None
    due = again and kept is not None and kept.due(recall(alone) if alone else None)
    return None if kept is None or due else kept.costs


def recall(name: str) -> Kept | None:
    """Return the costs stored under `name`; None where there are none, or they are broken."""
    return _parsed(load_cached_values(FILE).get(name))


def keep(name: str, kept: Kept) -> None:
    save_cached_value(FILE, name, asdict(kept))


def entries() -> list[Kept]:
    """All that is kept, the newest first."""
    every = (_parsed(entry) for entry in load_cached_values(FILE).values())
    return sorted((kept for kept in every if kept), key=lambda kept: -kept.when)


@cache
def _kept() -> TypeAdapter[Kept]:
    return TypeAdapter(Kept)


def _parsed(entry: Any) -> Kept | None:
    try:
        kept = _kept().validate_python(entry)
    except ValidationError:
        return None
    return kept if kept.costs.sound else None


def key(target: Component, drafter: Component, *more: object) -> str | None:
    """The key under which costs are kept; None for a model or drafter without an identity."""
    parts = [identity(target), identity(drafter)]
    if None in parts:
        return None
    content = json.dumps([FORMAT, *parts, *more, machine(), get_versions()])
    return hashlib.sha256(content.encode()).hexdigest()


def identity(part: Any) -> str | None:
    """Return a string that determines a model's or drafter's speed: its own `identity`, else its
    config.

    None where that is unknown: a network in memory may differ from its config, and a drafter of
    the user's own from its class.
    """
    if isinstance(part, Drafter):
        if part.identity is not None or part.has_own_speed:  # made of parts, or with settings of its own
            return part.identity
        if part.model is not None:
            return identity(part.model)
        built_in = type(part).__module__.startswith("foretoken.drafters.")
        return type(part).__qualname__ if built_in else None
    if part.identity is not None:
        return part.identity
    network: Any = None if part.has_own_speed else part.model
    if isinstance(network, Component):
        return identity(network)
    if not getattr(network, "name_or_path", None):
        return None
    config = {k: v for k, v in network.config.to_dict().items() if k != "_name_or_path"}
    facts = [type(network).__qualname__, network.dtype, part.device, part.runtime, config]
    return json.dumps(facts, sort_keys=True, default=str)


def machine() -> list[Any]:
    """The hardware that passes run on."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = {line.partition(":")[2].strip() for line in lines if line.startswith("model name")}
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    held = os.environ.get(INSTRUCTIONS_VARIABLE)  # to an instruction set that may be slower
    return [sorted(names) or platform.processor(), cores, torch.get_num_threads(), gpu, held]
