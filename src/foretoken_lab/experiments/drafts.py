"""Drafts that the paper leaves open: those that copy, heads and copies of the target, beside the
fastest of the paper's kinds; and distilled drafts beside what they were before. Measures nothing
itself."""

from __future__ import annotations

from typing import Any

from foretoken_lab.experiments import acceptance, walltime
from foretoken_lab.experiments.experiment import (
    BLANK,
    Case,
    Found,
    ResultRow,
    Section,
    Table,
    plus_minus,
    rounded,
    spanned,
)
from foretoken_lab.experiments.walltime import speed
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe

Best = dict[tuple[str, float], ResultRow]  # by draft and temperature, at the fastest gamma
OTHERS = ("draft", "T", "alpha", "c", "gamma", "times plain decoding", "of the paper's kinds")
DISTILLED = ("draft", "T", "alpha before", "after", "times plain decoding before", "after")


def cases(recipe: Recipe) -> list[Case]:
    """None: rows of the other experiments are enough."""
    return []


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    raise AssertionError(case)


def section(recipe: Recipe, results: Found) -> Section | None:
    """A table and a paragraph for each kind that the recipe has."""
    best = walltime.fastest(results)
    candidates = [show(recipe, results, best) for show in (_others, _distilled)]
    parts = [each for each in candidates if each is not None]
    if not parts:
        return None
    paragraphs, tables = zip(*parts, strict=True)
    return Section("Beyond the paper: other drafts", [*paragraphs], [*tables])


def _others(recipe: Recipe, results: Found, best: Best) -> tuple[str, Table] | None:
    """Describe the drafts that are neither a model of their own nor a table."""
    other = [d.label for d in recipe.drafts if not d.is_model and d.order is None]
    lines: list[tuple[str, ...]] = []
    speeds: list[float] = []
    for (label, temperature), row in best.items():
        if label not in other:
            continue
        speedup, alpha = speed(row), acceptance.known(results, label, temperature)
        rivals = [r for (name, t), r in best.items() if t == temperature and name not in other]
        rival = max(rivals, key=lambda r: speed(r).value, default=None)
        lines.append(
            (
                label,
                f"{temperature:g}",
                BLANK if alpha is None else plus_minus(alpha),
                rounded(row.result["c"], 3),
                str(row.case["gamma"]),
                plus_minus(speedup, 2),
                BLANK if rival is None else f"{rival.case['draft']} {plus_minus(speed(rival), 2)}",
            )
        )
        speeds.append(speedup.value)
    if not lines:
        return None
    paragraph = (
        "These drafts are of kinds that the paper does not measure. They run at "
        f"{spanned(speeds)} times the speed of plain decoding. A draft that copies has no draft "
        "token where nothing repeats, which counts as 0 in alpha."
    )
    return paragraph, Table("Drafts of other kinds, at the gamma that was fastest", OTHERS, lines)


def _distilled(recipe: Recipe, results: Found, best: Best) -> tuple[str, Table] | None:
    """Drafts that were taught by the target, where their selves before are in the recipe."""
    lines: list[tuple[str, ...]] = []
    gaps: list[float] = []
    for draft in recipe.drafts:
        for temperature in recipe.temperatures if draft.distilled_from else ():
            labels = str(draft.distilled_from), draft.label
            alphas = [acceptance.known(results, label, temperature) for label in labels]
            speeds = [best.get((label, temperature)) for label in labels]
            before, after = alphas
            if before is None or after is None:
                continue
            gaps.append(after.value - before.value)
            speed_cells = [BLANK if row is None else plus_minus(speed(row), 2) for row in speeds]
            cells = plus_minus(before), plus_minus(after), *speed_cells
            lines.append((draft.label, f"{temperature:g}", *cells))
    if not lines:
        return None
    paragraph = (
        "Distilling (training on the target's distributions) changes alpha by "
        f"{spanned(gaps, 3, sign=True)}. The draft's costs stay as they were, so speed can only "
        "follow alpha."
    )
    return paragraph, Table("Drafts before and after they were distilled", DISTILLED, lines)
