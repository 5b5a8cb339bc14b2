"""The 1.25x of section 3.6: what a bigram table, whose draft tokens cost next to nothing, gains
with gamma 3."""

from __future__ import annotations

from typing import Any

from foretoken import theory
from foretoken_lab.experiments import paper, walltime
from foretoken_lab.experiments.experiment import (
    Case,
    Found,
    ResultRow,
    Section,
    Table,
    done,
    plus_minus,
    rounded,
)
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe, RecipeDraft

ORDER = 2
HEAD = ("T", "alpha", "c", "expected, c = 0", "expected", "measured")


def cases(recipe: Recipe) -> list[Case]:
    """Every bigram table at every temperature, unless tables 2 and 4 have it with that gamma."""
    if "walltime" in recipe.experiments and paper.BIGRAM_GAMMA in recipe.gammas:
        return []
    return [
        {"draft": draft.label, "temperature": temperature, "gamma": paper.BIGRAM_GAMMA}
        for draft in recipe.drafts
        if _is_bigram(draft)
        for temperature in recipe.temperatures
    ]


def _is_bigram(draft: RecipeDraft) -> bool:
    return draft.order == ORDER or draft.paper == "Bigram"


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Measure as tables 2 and 4 are measured."""
    return walltime.measure(pairs, case)


def section(recipe: Recipe, results: Found) -> Section | None:
    """Beside the paper's claim."""
    rows = done(results, "bigram") + [
        row
        for row in done(results, "walltime")
        if row.case["gamma"] == paper.BIGRAM_GAMMA and _is_bigram(recipe.draft(row.case["draft"]))
    ]
    if not rows:
        return None
    caption = f"A bigram table with gamma {paper.BIGRAM_GAMMA}"
    return Section(
        "Section 3.6: 1.25x by a bigram table",
        _paragraphs(),
        [Table(caption, HEAD, [_line(results, row) for row in rows])],
    )


def _paragraphs() -> list[str]:
    alpha, gamma, speed = paper.BIGRAM_ALPHA, paper.BIGRAM_GAMMA, paper.BIGRAM_SPEED
    return [
        f"The paper: alpha about {alpha:g} with T5-XXL and gamma {gamma} give {speed:g}x. Theorem "
        f"3.8 with c = 0 gives {theory.walltime_factor(alpha, gamma, 0):.3f}x. Measured is less "
        "than expected where a lookup in the table takes time, and where a forward pass over four "
        "tokens takes longer than one over a single token, which counts as 1 in the theorem."
    ]


def _alpha(results: Found, row: ResultRow) -> float:
    return walltime.alpha(results, row) or 0.0


def _line(results: Found, row: ResultRow) -> tuple[str, ...]:
    acceptance = _alpha(results, row)
    return (
        f"{row.case['temperature']:g}",
        rounded(acceptance, 3),
        rounded(row.result["c"], 3),
        rounded(theory.walltime_factor(acceptance, paper.BIGRAM_GAMMA, 0)),
        rounded(walltime.expected(results, row)),
        plus_minus(walltime.speed(row), 2),
    )
