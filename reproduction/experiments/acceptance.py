"""Table 3: alpha of every draft, the mean of sum min(p, q) over text that the target wrote
(Corollary 3.6; section 4.2 has 10,000 tokens), at each temperature."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from foretoken.drafters.base import Drafter
from foretoken.errors import InputError
from foretoken.measurement.agreement import compute_overlaps
from foretoken.measurement.estimate import Estimate, estimate_ratio
from foretoken.measurement.footprint import compute_drafter_footprint
from foretoken.models.base import Model
from foretoken.sampling.params import SamplingParams
from reproduction.experiments import beside_paper, paper
from reproduction.experiments.beside_paper import FigurePair
from reproduction.experiments.experiment import (
    ABOUT,
    BLANK,
    Case,
    Columns,
    Experiment,
    Found,
    Plot,
    ResultRow,
    Section,
    done,
    estimate,
    plus_minus,
    rounded,
    tabulated,
)
from reproduction.pairs import Pairs, WrittenTexts
from reproduction.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure


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
    return {
        "alpha": asdict(alpha(spec.target, spec.drafter, texts, case["temperature"])),
        "tokens": sum(len(text.tokens) for text in texts),
        "texts": len(texts),
        "parameters": compute_drafter_footprint(
            spec.drafter, spec.draft_name, pairs.recipe.dtype
        ).parameters,
    }


def alpha(
    target: Model, drafter: Drafter, texts: list[WrittenTexts], temperature: float
) -> Estimate:
    """Corollary 3.6 on the target's own texts, two or more: the interval is over texts. A place
    without a draft token counts as 0."""
    params = SamplingParams(temperature)
    betas = [
        [beta or 0.0 for beta in compute_overlaps(target, drafter, request, text, params)]
        for request, text in texts
    ]
    acceptance = estimate_ratio([sum(one) for one in betas], [len(one) for one in betas], 0, 1)
    if acceptance is None:
        raise InputError(f"{len(texts)} text; give two prompts or more, intervals are over texts")
    return acceptance


def section(recipe: Recipe, results: Found) -> Section | None:
    """The table beside the paper's, and how far they agree."""
    rows = done(results, "acceptance")
    if not rows:
        return None

    def size(row: ResultRow) -> str:
        parameters = row.result["parameters"]
        return BLANK if parameters is None else f"{parameters:,}"

    def difference(row: ResultRow) -> str:
        printed = _printed(recipe, row)
        return BLANK if printed is None else f"{_own(row).value - printed:+.2f}"

    columns: Columns[ResultRow] = {
        "draft": ABOUT["draft"],
        "parameters": size,
        "T": ABOUT["T"],
        "alpha here": lambda row: plus_minus(_own(row)),
        "alpha, paper": lambda row: rounded(_printed(recipe, row)),
        "here - paper": difference,
        "tokens": lambda row: f"{row.result['tokens']:,}",
    }
    caption = "alpha with 95 % intervals over texts; T=0: how often both argmaxes agree"
    return Section(
        "Table 3: how far drafts agree with the target",
        _said(recipe, rows),
        [tabulated(caption, rows, columns)],
        [Plot("alpha", "alpha by draft and temperature", partial(_draw, recipe, rows))],
    )


EXPERIMENT = Experiment(section, cases, measure)


def known(results: Found, draft: str, temperature: float) -> Estimate | None:
    """alpha as measured here."""
    for row in done(results, "acceptance"):
        if row.case == {"draft": draft, "temperature": temperature}:
            return _own(row)
    return None


def _own(row: ResultRow) -> Estimate:
    return estimate(row.result["alpha"])


def _printed(recipe: Recipe, row: ResultRow) -> float | None:
    return paper.agreement(recipe.paper, recipe.draft(row.draft).paper, row.temperature)


def _said(recipe: Recipe, rows: list[ResultRow]) -> list[str]:
    tokens = min(row.result["tokens"] for row in rows)
    sentence = (
        "The mean of sum min(p, q) at every place of texts that the target wrote itself, "
        f"{tokens:,} tokens or more for each figure (the paper: {paper.ALPHA_TOKENS:,})."
    )
    if tokens < paper.ALPHA_TOKENS:
        sentence += " Fewer tokens than the paper's widen the intervals, and change nothing else."
    pairs = [
        FigurePair(row.draft, row.temperature, _own(row).value, printed)
        for row in rows
        if (printed := _printed(recipe, row)) is not None
    ]
    return [sentence, *beside_paper.alphas(pairs)]


def _draw(recipe: Recipe, rows: list[ResultRow], figure: Figure) -> None:
    """Bars with intervals for ours, diamonds for the paper's."""
    axes = figure.add_subplot()
    labels = [draft.label for draft in recipe.drafts]
    for t, temperature in enumerate(recipe.temperatures):
        shift = 0.25 * (t - (len(recipe.temperatures) - 1) / 2)
        group = [row for row in rows if row.temperature == temperature]
        at = [labels.index(row.draft) + shift for row in group]
        own = [_own(row) for row in group]
        errors = [[one.value - one.low for one in own], [one.high - one.value for one in own]]
        look: dict[str, Any] = {"color": f"C{t}", "label": f"here, T={temperature:g}"}
        ink = axes.xaxis.label.get_color()
        axes.bar(at, [one.value for one in own], 0.22, yerr=errors, ecolor=ink, **look)
        marks = [(x, p) for x, row in zip(at, group, strict=True) if (p := _printed(recipe, row))]
        if marks:
            look["label"] = f"paper, T={temperature:g}"
            axes.plot(*zip(*marks, strict=True), "D", mec="white", **look)
    axes.set_xticks(range(len(labels)), labels)
    axes.set_ylim(0, 1)
    axes.set_ylabel("alpha")
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, ncols=2, fontsize="small")
