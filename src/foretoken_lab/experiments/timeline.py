"""Figure 5: when the encoders and decoders of target and draft ran, with gamma 7, gamma 3 and
plainly."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.lab.view import ModelCall, blocks, timeline
from foretoken.request import uninterrupted
from foretoken_lab.experiments import paper
from foretoken_lab.experiments.experiment import (
    BLANK,
    Case,
    Found,
    Plot,
    ResultRow,
    Section,
    Table,
    done,
    without_blanks,
)
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 64  # tokens: more would be blocks too small to see
HEAD = (
    "",
    "tokens",
    "target calls",
    "draft calls",
    "ms",
    "ms of target",
    "its encoder",
    "ms of draft",
    "its encoder",
)


def cases(recipe: Recipe) -> list[Case]:
    """One text with the first draft that is a model."""
    drafts = [draft.label for draft in recipe.drafts if draft.is_model]
    return [{"draft": drafts[0]}] if drafts else []


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """The calls of three runs of the first prompt, each after one that warms up."""
    spec, recipe = pairs.spec(case["draft"]), pairs.recipe
    length = min(MOST, recipe.max_new_tokens)
    rows: list[dict[str, Any]] = []
    for gamma in paper.FIGURE_5_GAMMAS:
        how: dict[str, Any] = {"gamma": gamma, "max_new_tokens": length}
        _, one = (uninterrupted(spec.generate(pairs.prompts[0], **how))[0] for _ in range(2))
        rows.append(
            {
                "gamma": gamma,
                "tokens": len(one.tokens),
                "target_calls": one.stats.target_calls,
                "draft_calls": one.stats.draft_calls,
                "calls": [list(call) for call in timeline(one)],
            }
        )
    return {"rows": rows, "encoder_decoder": spec.target.encoder_decoder}


def section(recipe: Recipe, results: Found) -> Section | None:
    """The picture, and the calls counted."""
    rows = done(results, "timeline")
    if not rows:
        return None
    own = rows[0]
    caption = "The same text three times"
    return Section(
        "Figure 5: when which model ran",
        [
            "An encoder runs once, before the first step; a target without one reads the prompt "
            "with its decoder. In the diagram the draft is called gamma times before each call of "
            "the target; here fewer times where the text ends, and where a draft stops. The "
            "diagram is simplified and has no times: those in the table hold the reading of the "
            "prompt too."
        ],
        [without_blanks(Table(caption, HEAD, [_line(row) for row in own.result["rows"]]))],
        [Plot("timeline", "A block a call; gaps are the verdict", partial(_draw, own), (7.5, 2.6))],
    )


def _calls(row: dict[str, Any]) -> list[ModelCall]:
    return [ModelCall(*call) for call in row["calls"]]


def _name(row: dict[str, Any]) -> str:
    return f"gamma {row['gamma']}" if row["gamma"] else "plain"


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    return (
        _name(row),
        str(row["tokens"]),
        str(row["target_calls"]),
        str(row["draft_calls"]),
        f"{_end(row) * 1e3:.1f}",
        *(_milliseconds(row, part) for part in ("target", "target encoder")),
        *(_milliseconds(row, part) for part in ("draft", "draft encoder")),
    )


def _milliseconds(row: dict[str, Any], part: str) -> str:
    """Return the time of the calls whose names begin so."""
    spent = [call.seconds for call in _calls(row) if call.part.startswith(part)]
    return f"{sum(spent) * 1e3:.1f}" if spent else BLANK


def _end(row: dict[str, Any]) -> float:
    """Seconds until the last call was over."""
    last = _calls(row)[-1]
    return last.at + last.seconds


def _draw(own: ResultRow, figure: Figure) -> None:
    blocks(figure, {_name(row): _calls(row) for row in own.result["rows"]})
