"""Figure 5: when target and draft ran, encoders included, with gamma 7, gamma 3 and plainly."""

from __future__ import annotations

from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

from foretoken.lab.experiments import paper
from foretoken.lab.experiments.experiment import Case, Found, Plot, Row, Section, Table, done
from foretoken.lab.recipes.pairs import Pairs
from foretoken.lab.recipes.recipe import Recipe
from foretoken.lab.timeline import Call, blocks, timeline
from foretoken.lab.uninterrupted import uninterrupted

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST = 64  # tokens: more would be blocks too small to see
HEAD = ("", "tokens", "target calls", "draft calls", "ms", "ms of target", "ms of draft")


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


def section(recipe: Recipe, found: Found) -> Section | None:
    """The picture, and the calls counted."""
    rows = done(found, "timeline")
    if not rows:
        return None
    own = rows[0]
    return Section(
        "Figure 5: when which model ran",
        [_said(own)],
        [Table("The same text three times", HEAD, [_line(row) for row in own.result["rows"]])],
        [Plot("timeline", "A block a call; gaps are the verdict", partial(_draw, own), (7.5, 2.6))],
    )


def _calls(row: dict[str, Any]) -> list[Call]:
    return [Call(*call) for call in row["calls"]]


def _name(row: dict[str, Any]) -> str:
    return f"gamma {row['gamma']}" if row["gamma"] else "plain"


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    calls = _calls(row)
    spent = {
        model: sum(call.seconds for call in calls if call.part.startswith(model)) * 1e3
        for model in ("target", "draft")
    }
    last = calls[-1]
    return (
        _name(row),
        str(row["tokens"]),
        str(row["target_calls"]),
        str(row["draft_calls"]),
        f"{(last.at + last.seconds) * 1e3:.1f}",
        f"{spent['target']:.1f}",
        f"{spent['draft']:.1f}",
    )


def _said(own: Row) -> str:
    speculative = [row for row in own.result["rows"] if row["gamma"]]
    plain = next(row for row in own.result["rows"] if not row["gamma"])
    kind = "an encoder-decoder, as the paper's" if own.result["encoder_decoder"] else "a decoder"
    runs = ", ".join(f"{row['target_calls']} with gamma {row['gamma']}" for row in speculative)
    each = fmean(row["tokens"] / row["target_calls"] for row in speculative)
    return (
        f"The pair is {kind}; the first blocks read the prompt, encoders included, once for each "
        f"model. Plain decoding calls the target {plain['target_calls']} times for "
        f"{plain['tokens']} tokens, speculation {runs}: {each:.1f} tokens a call. Every target "
        "call is preceded by the draft's, as in the paper's figure; widths differ as c does."
    )


def _draw(own: Row, figure: Figure) -> None:
    blocks(figure, {_name(row): _calls(row) for row in own.result["rows"]})
