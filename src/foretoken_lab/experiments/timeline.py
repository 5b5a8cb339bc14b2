"""Figure 5: when the encoders and decoders of target and draft ran, with gamma 7, gamma 3 and
plainly."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from foretoken.lab.uninterrupted import uninterrupted
from foretoken.lab.view import ModelCall, blocks, timeline
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
        _paragraphs(own),
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
    """Of the calls whose names begin so."""
    spent = [call.seconds for call in _calls(row) if call.part.startswith(part)]
    return f"{sum(spent) * 1e3:.1f}" if spent else BLANK


def _paragraphs(own: ResultRow) -> list[str]:
    """What is as in the paper's diagram, and what is not."""
    rows = own.result["rows"]
    plain = next(row for row in rows if not row["gamma"])
    drafting = [row for row in rows if row["gamma"]]
    runs = ", ".join(f"{row['target_calls']} with gamma {row['gamma']}" for row in drafting)
    before = " and ".join(f"{row['draft_calls'] / row['target_calls']:.1f}" for row in drafting)
    full = " and ".join(str(row["gamma"]) for row in drafting)
    share = " and ".join(f"{_end(row) / _end(plain):.2f}" for row in drafting)
    paragraphs = [
        _encoders(own),
        f"Plain decoding calls the target {plain['target_calls']} times for {plain['tokens']} "
        f"tokens, speculation {runs}. Before a target call the draft is called {before} times on "
        f"average, in the diagram {full}: fewer where the text ends, and where a draft stops.",
    ]
    if not any(row["draft_calls"] for row in drafting):
        return paragraphs
    return [
        *paragraphs,
        f"The diagram is simplified and has no times. Here a call of the draft takes "
        f"{_width(drafting, 'draft') / _width(drafting, 'target'):.2f} of the target's, and the "
        f"text takes {share} of the time of plain decoding, the reading of the prompt included.",
    ]


def _encoders(own: ResultRow) -> str:
    if not own.result["encoder_decoder"]:
        return "The target has no encoder, unlike the paper's: its decoder reads the prompt."
    first = own.result["rows"][0]
    encoders = [
        f"{sum(spent) * 1e3:.1f} ms of the {model}'s"
        for model in ("target", "draft")
        if (spent := [c.seconds for c in _calls(first) if c.part == f"{model} encoder"])
    ]
    if not encoders:
        return "The target is an encoder-decoder, as the paper's; its encoder was not timed apart."
    return (
        "The target is an encoder-decoder, as the paper's. An encoder runs once, before the first "
        f"step: {' and '.join(encoders)}, of {_end(first) * 1e3:.1f} ms with gamma "
        f"{first['gamma']}."
    )


def _end(row: dict[str, Any]) -> float:
    """Seconds until the last call was over."""
    last = _calls(row)[-1]
    return last.at + last.seconds


def _width(rows: list[dict[str, Any]], part: str) -> float:
    """Mean seconds of a call."""
    return fmean(call.seconds for row in rows for call in _calls(row) if call.part == part)


def _draw(own: ResultRow, figure: Figure) -> None:
    blocks(figure, {_name(row): _calls(row) for row in own.result["rows"]})
