"""The draft and gamma to use, or the advice not to speculate, from the figures of a benchmark; and
its file."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from statistics import geometric_mean
from typing import Any

from pydantic import TypeAdapter, ValidationError

from foretoken.errors import InputError, mismatch
from foretoken.storage import files

FORMAT = "foretoken.bench"


@dataclass(frozen=True, slots=True)
class Plan:
    """The fastest of the drafts and gammas that were measured."""

    draft: str  # "none" where none is faster than plain decoding
    gamma: int  # the fastest fixed one of that draft; 0: plain decoding
    automatic: bool  # whether gamma is best chosen before every step
    speedup: float  # over plain decoding; the mean over the numbers of texts at once
    certain: bool  # whether the quartiles are on one side of 1
    tried: str  # the fastest draft, also where it does not pay
    temperature: float
    load: dict[str, Any]  # keywords of `foretoken.load`

    @property
    def speculate(self) -> bool:
        return self.draft != "none"


def choose(rows: list[dict[str, Any]], temperature: float, load: dict[str, Any]) -> Plan:
    """Return the plan of a document's `figures`, of which one at least is there.

    Args:
        rows: For every draft, number of texts at once and gamma, its `speedup`.
        temperature: The temperature of the texts.
        load: Keywords of `foretoken.load` besides the draft.
    """
    speedups: dict[tuple[str, int | None], list[dict[str, float]]] = {}
    for row in rows:
        speedups.setdefault((row["draft"], row["gamma"]), []).append(row["speedup"])
    gains = {each: geometric_mean(x["median"] for x in all) for each, all in speedups.items()}
    best = max([each for each in gains if each[1] != 0] or gains, key=lambda each: gains[each])
    fixed = [each for each in gains if each[0] == best[0] and each[1] is not None]
    tried, gamma = max(fixed, key=lambda each: gains[each])
    pays = gains[best] > 1 and best[1] != 0
    draft = tried if pays else "none"
    return Plan(
        draft=draft,
        gamma=int(gamma or 0) if pays else 0,
        automatic=pays and best[1] is None,
        speedup=gains[best],
        certain=all(x["q1"] > 1 if pays else x["q3"] < 1 for x in speedups[best]),
        tried=tried,
        temperature=temperature,
        load=load | {"draft": draft},
    )


def read_plan(path: Path) -> Plan:
    """Read the plan in a file of `foretoken bench --out`. InputError for any other file."""
    try:
        document = files.parse_json(files.read_text(path, "JSON"))
    except ValueError as error:
        raise InputError(f"{path} is not valid JSON: {error}") from None
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise InputError(f"{path} is not a benchmark; make one with foretoken bench --out")
    try:
        return TypeAdapter(Plan).validate_python(document.get("best"))
    except ValidationError as error:
        raise InputError(f"{path}: best: {mismatch(dict(error.errors()[0]))}") from None
