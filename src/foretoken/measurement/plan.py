"""Choose a plan from the results of a benchmark: the draft and gamma to use, or plain decoding."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from foretoken.costing import contention
from foretoken.errors import InputError, describe_mismatch
from foretoken.loading.options import ROUNDED_DTYPES, LoadOptions, require_known
from foretoken.measurement.options import MIN_QUARTILE_ROUNDS
from foretoken.storage import files

BENCH_FILE_FORMAT = "foretoken.bench"
ROUNDED_COPIES = [("draft_dtype", f"self:{kind}") for kind in ROUNDED_DTYPES]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Keyword arguments of `Speculator.generate` that a benchmark used."""

    gamma: int | None
    rule: str
    temperature: float
    top_k: int
    top_p: float


@dataclass(frozen=True, slots=True)
class Plan:
    """The fastest draft and gamma of a benchmark, among the drafts and gammas that were clearly
    faster than plain decoding: the lower quartile of the speed-up is above 1."""

    draft: str  # "none" if no draft was clearly faster than plain decoding
    gamma: int  # the fastest fixed gamma with that draft; 0: plain decoding
    speedup: float  # of `tried` over plain decoding; the geometric mean over batch sizes
    certain: bool  # whether the measurements clearly support the plan
    tried: str  # the fastest draft, even if it was not clearly faster and `draft` is "none"
    load: dict[str, Any]  # keyword arguments of `foretoken.load`
    generate: PlanOptions  # `gamma` may be None: automatic

    @property
    def speculate(self) -> bool:
        return self.draft != "none"


def choose_plan(rows: list[dict[str, Any]], measured: PlanOptions, load: dict[str, Any]) -> Plan:
    """Return the plan that follows from a benchmark's results.

    Args:
        rows: One or more results, each a dict with `draft`, `batch`, `gamma`, `speedup`, and
            `others`, the share of the CPUs that other processes used.
        measured: The generation options of all results; `gamma` is ignored.
        load: Keyword arguments of `foretoken.load` without the draft.
    """
    contestants: dict[tuple[str, int | None], list[dict[str, Any]]] = {}
    for row in rows:
        contestants.setdefault((row["draft"], row["gamma"]), []).append(row)
    gains = {
        key: geometric_mean(row["speedup"]["median"] for row in all)
        for key, all in contestants.items()
    }
    trusted = {key for key, all in contestants.items() if are_trusted(all)}
    drafted = [key for key in gains if key[1] != 0]
    certain = [
        k for k in drafted if k in trusted and _are_beyond_one(contestants[k], "q1", above=True)
    ]
    best = max(certain or drafted or gains, key=lambda key: gains[key])
    tried, gamma = best
    if not certain:
        draft, fastest, gamma = "none", 0, 0
    else:
        fixed = [key for key in drafted if key[0] == tried and key[1] is not None] or [best]
        draft, fastest = tried, int(max(fixed, key=lambda key: gains[key])[1] or 0)
    return Plan(
        draft=draft,
        gamma=fastest,
        speedup=gains[best],
        certain=bool(certain)
        or not drafted
        or (best in trusted and _are_beyond_one(contestants[best], "q3", above=False)),
        tried=tried,
        load={n: v for n, v in load.items() if not _is_superfluous(n, draft)} | {"draft": draft},
        generate=replace(measured, gamma=gamma),
    )


def are_trusted(rows: list[dict[str, Any]]) -> bool:
    """Return whether the quartiles of these results are meaningful: there were enough rounds, and
    no other process was busy."""
    enough = all(row["speedup"]["n"] >= MIN_QUARTILE_ROUNDS for row in rows)
    return enough and not any(contention.describe_contention(row["others"]) for row in rows)


def _are_beyond_one(rows: list[dict[str, Any]], quartile: str, *, above: bool) -> bool:
    values = [row["speedup"][quartile] for row in rows]
    return min(values) > 1 if above else max(values) < 1


def _is_superfluous(name: str, draft: str) -> bool:
    """Return whether an option of `load` has no effect with this draft: a draft_* option with the
    draft "none", or a draft_dtype that the draft's name, such as self:int8, gives already."""
    return name.startswith("draft_") if draft == "none" else (name, draft) in ROUNDED_COPIES


def read_plan(path: Path) -> Plan:
    """Return the plan in a file of `foretoken bench --out`. Raises InputError for other files and
    for a benchmark without results."""
    text = files.read_text(path, "the JSON of foretoken bench --out")
    try:
        document = files.parse_json(text)
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != BENCH_FILE_FORMAT:
        raise InputError(f"{path} is not a benchmark; make one with foretoken bench --out")
    if document.get("best") is None:
        raise InputError(f"{path} has no results yet; let foretoken bench finish a round")
    try:
        plan = TypeAdapter(Plan).validate_python(document["best"])
        options = {n: value for n, value in plan.load.items() if n not in ("target", "draft")}
        if not isinstance(plan.load.get("target"), str):
            raise InputError("load has no target; run the benchmark again")
        require_known(options, "load")
        LoadOptions(**options)
    except ValidationError as error:
        raise InputError(f"{path}: best: {describe_mismatch(dict(error.errors()[0]))}") from None
    except InputError as error:
        raise InputError(f"{path}: best: {error}") from None
    return plan
