"""Table 3: alpha of every draft, the mean of sum min(p, q) over text that the target wrote
(Corollary 3.6; section 4.2 has 10,000 tokens), at each temperature."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.drafters.base import Drafter
from foretoken.errors import InputError
from foretoken.lab.agreement import overlaps
from foretoken.lab.estimate import Estimate, ratio
from foretoken.lab.measurement.measure import of_drafter
from foretoken.models.base import Model
from foretoken.sampling.params import SamplingParams
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
    estimate,
    plus_minus,
    rounded,
    without_blanks,
)
from foretoken_lab.recipes.pairs import Pairs, WrittenTexts
from foretoken_lab.recipes.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HEAD = ("draft", "parameters", "T", "alpha here", "alpha, paper", "here - paper", "tokens")


def cases(recipe: Recipe) -> list[Case]:
    """Every draft at every temperature."""
    return [
        {"draft": draft.label, "temperature": temperature}
        for draft in recipe.drafts
        for temperature in recipe.temperatures
    ]


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """alpha over the texts that the target writes at that temperature."""
    spec = pairs.spec(case["draft"])
    texts = pairs.texts(case["temperature"])
    acceptance = alpha(spec.target, spec.drafter, texts, case["temperature"])
    size = of_drafter(spec.drafter, spec.draft_name, pairs.recipe.dtype)
    return {
        "alpha": asdict(acceptance),
        "tokens": sum(len(text.tokens) for text in texts),
        "texts": len(texts),
        "parameters": size.parameters,
    }


def alpha(
    target: Model, drafter: Drafter, texts: list[WrittenTexts], temperature: float
) -> Estimate:
    """Corollary 3.6 on the target's own texts, two or more: the interval is over texts. A place
    without a draft token counts as 0."""
    params = SamplingParams(temperature)
    betas = [
        [beta or 0.0 for beta in overlaps(target, drafter, request, text, params)]
        for request, text in texts
    ]
    acceptance = ratio([sum(one) for one in betas], [len(one) for one in betas], 0, 1)
    if acceptance is None:
        raise InputError(f"{len(texts)} text; give two prompts or more, intervals are over texts")
    return acceptance


def section(recipe: Recipe, results: Found) -> Section | None:
    """The table beside the paper's."""
    rows = done(results, "acceptance")
    if not rows:
        return None
    lines = [_line(recipe, row) for row in rows]
    caption = "alpha with 95 % intervals over texts; T=0: how often both argmaxes agree"
    return Section(
        "Table 3: how far drafts agree with the target",
        _paragraphs(rows),
        [without_blanks(Table(caption, HEAD, lines))],
        [Plot("alpha", "alpha by draft and temperature", partial(_draw, recipe, rows))],
    )


def known(results: Found, draft: str, temperature: float) -> Estimate | None:
    """alpha as measured here."""
    for row in done(results, "acceptance"):
        if row.case == {"draft": draft, "temperature": temperature}:
            return estimate(row.result["alpha"])
    return None


def _line(recipe: Recipe, row: ResultRow) -> tuple[str, ...]:
    own, printed = estimate(row.result["alpha"]), _printed(recipe, row)
    size = row.result["parameters"]
    return (
        row.case["draft"],
        BLANK if size is None else f"{size:,}",
        f"{row.case['temperature']:g}",
        plus_minus(own),
        rounded(printed),
        BLANK if printed is None else f"{own.value - printed:+.2f}",
        f"{row.result['tokens']:,}",
    )


def _printed(recipe: Recipe, row: ResultRow) -> float | None:
    name = recipe.draft(row.case["draft"]).paper
    return paper.agreement(recipe.paper, name, row.case["temperature"])


def _paragraphs(rows: list[ResultRow]) -> list[str]:
    tokens = min(row.result["tokens"] for row in rows)
    return [
        f"The mean of sum min(p, q) at every place of texts that the target wrote itself, "
        f"{tokens:,} tokens or more for each figure (the paper: 10,000; fewer widen the intervals, "
        "and change nothing else). Other models, trained on other text, have other alphas than the "
        "paper's; what can agree is their order."
    ]


def _draw(recipe: Recipe, rows: list[ResultRow], figure: Figure) -> None:
    """Intervals of our alphas, with a mark for the paper's."""
    from matplotlib import rcParams  # late, as all of matplotlib

    axes = figure.add_subplot()
    labels = [draft.label for draft in recipe.drafts]
    temperatures = recipe.temperatures
    for t, temperature in enumerate(temperatures):
        group = [row for row in rows if row.case["temperature"] == temperature]
        at = [
            labels.index(row.case["draft"]) + 0.25 * (t - (len(temperatures) - 1) / 2)
            for row in group
        ]
        values = [estimate(row.result["alpha"]) for row in group]
        errors = [[v.value - v.low for v in values], [v.high - v.value for v in values]]
        heights = [v.value for v in values]
        style = {"color": f"C{t}", "ecolor": rcParams["text.color"]}
        axes.bar(at, heights, 0.22, yerr=errors, label=f"here, T={temperature:g}", **style)
        marks = [(x, p) for x, row in zip(at, group, strict=True) if (p := _printed(recipe, row))]
        if marks:
            name = f"paper, T={temperature:g}"
            axes.plot(*zip(*marks, strict=True), "D", color=f"C{t}", mec="white", label=name)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1)
    axes.set_ylabel("alpha")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, fontsize="small")
