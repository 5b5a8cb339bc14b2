"""Table 5 and its text (appendix A.5): alpha with lenience, at temperature 1 and at 0, and what
speed follows. Text written so is no longer in the target's distribution; by how much is said
beside."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from foretoken import theory
from foretoken.errors import InputError
from foretoken.measurement.agreement import ScoredPosition, replay_positions
from foretoken.measurement.estimate import estimate_ratio
from foretoken.sampling.params import SamplingParams
from reproduction.experiments import paper
from reproduction.experiments.beside_paper import NO_COUNTERPART
from reproduction.experiments.experiment import (
    Case,
    Experiment,
    Found,
    Plot,
    PlotLine,
    ResultRow,
    Section,
    Table,
    done,
    estimate,
    plotted,
    plus_minus,
    rounded,
    spanned,
)
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# the distribution that lenience compares with, also at temperature 0
STANDARD = SamplingParams(1.0)
GAMMAS = range(65)
CAPTIONS = {
    1: "alpha with lenience at T=1, and the factor of Theorem 3.8 at its best gamma",
    0: "The same at T=0, where a draft token passes that has p >= l max p",
}


def cases(recipe: Recipe) -> list[Case]:
    """Every draft at temperature 1 and at 0, as far as the recipe has them."""
    return [
        {"draft": draft.label, "temperature": temperature}
        for draft in recipe.drafts
        for temperature in recipe.temperatures
        if temperature in (0, 1)
    ]


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """alpha at every lenience, on one text for all: `alphas` in the order of `lenience`."""
    spec, lenience = pairs.spec(case["draft"]), pairs.recipe.lenience
    greedy = case["temperature"] == 0
    drafted = SamplingParams() if greedy else STANDARD
    texts: list[list[list[float]]] = []  # of every text, place and lenience
    for request, tokens in pairs.texts(case["temperature"]):
        places = replay_positions(spec.target, spec.drafter, request, tokens, STANDARD, drafted)
        texts.append([kept(place, lenience, greedy=greedy) for place in places])
    lengths = [len(text) for text in texts]
    alphas: list[dict[str, Any]] = []
    for i in range(len(lenience)):
        acceptance = estimate_ratio(
            [sum(place[i] for place in text) for text in texts], lengths, 0, 1
        )
        if acceptance is None:
            raise InputError("1 text; give two prompts or more, intervals are over texts")
        alphas.append(asdict(acceptance))
    return {"lenience": lenience, "alphas": alphas, "tokens": sum(lengths)}


def kept(place: ScoredPosition, lenience: list[float], *, greedy: bool) -> list[float]:
    """The probability of acceptance at each l: sum min(p / l, q), or the share of q's mass where
    p >= l max p."""
    if place.draft_token is None:
        return [0.0] * len(lenience)
    p = place.p.double().numpy()
    if place.q is None:
        q = np.zeros(len(p))
        q[place.draft_token] = 1.0
    else:
        q = place.q.double().numpy()
    form = theory.greedy_lenient_beta if greedy else theory.lenient_beta
    return [form(p, q, each) for each in lenience]


def section(recipe: Recipe, results: Found) -> Section | None:
    """Both tables beside the paper's, and the factors that follow."""
    rows = done(results, "lenience")
    if not rows:
        return None
    head = ("draft", *(f"l = {value:g}" for value in recipe.lenience))
    tables = [
        Table(caption, head, [line for row in group for line in _lines(recipe, row)])
        for temperature, caption in CAPTIONS.items()
        if (group := [row for row in rows if row.temperature == temperature])
    ]
    return Section(
        "Table 5: what lenience would gain",
        _said(recipe, rows),
        tables,
        [Plot("lenience", "alpha over 1 / l at temperature 1", partial(_draw, recipe, rows))],
    )


EXPERIMENT = Experiment(section, cases, measure)


def _lines(recipe: Recipe, row: ResultRow) -> list[tuple[str, ...]]:
    """Ours, the paper's, and factors with the paper's c; at T=1 the distance from the
    distribution."""
    draft = recipe.draft(row.draft)
    alphas = [estimate(one) for one in row.result["alphas"]]
    printed = [paper.lenient(draft.paper, value, row.temperature) for value in recipe.lenience]
    lines = [(draft.label, *map(plus_minus, alphas))]
    if printed != [None] * len(printed):
        lines.append((f"– {draft.paper}, paper", *map(rounded, printed)))
    factors = [rounded(_factor(one.value)) for one in alphas]
    lines.append((f"– factor with c = {paper.LENIENT_C:g}", *factors))
    if row.temperature and recipe.lenience[0] == 1:
        distances = [rounded(one.value - alphas[0].value, 3) for one in alphas]
        lines.append(("– distance from the distribution", *distances))
    return lines


def _factor(alpha: float) -> float:
    return max(theory.walltime_factor(alpha, gamma, paper.LENIENT_C) for gamma in GAMMAS)


def _said(recipe: Recipe, rows: list[ResultRow]) -> list[str]:
    alphas = next(line.alphas for line in paper.TABLE_5 if line.draft == "T5-small")
    attainable = ", ".join(rounded(_factor(alpha)) for alpha in alphas)
    falls = len(recipe.lenience) > 1 and recipe.lenience == sorted(recipe.lenience, reverse=True)
    return [
        "With lenience l a draft token is compared with l q in place of q: alpha is then sum "
        "min(p / l, q), no token is above p / l, and the distance from the target's distribution "
        "(total variation) is alpha with lenience minus alpha without.",
        *(
            _rise(recipe, group)
            for temperature in CAPTIONS
            if falls and (group := [row for row in rows if row.temperature == temperature])
        ),
        "The factors 2.5, 3.1, 3.6 and 5 of the paper's text follow from its table with no gamma "
        f"at the c = {paper.LENIENT_C:g} that it names ({attainable}); the last chapter has "
        "those at T=0.",
    ]


def _rise(recipe: Recipe, rows: list[ResultRow]) -> str:
    """Compare how far alpha rises from the first lenience to the last, here and in the paper."""
    first, *_, last = recipe.lenience
    rises: list[float] = []
    printed: list[tuple[float, float]] = []  # how far it rises there and here
    for row in rows:
        start, *_, end = (estimate(one).value for one in row.result["alphas"])
        rises.append(end - start)
        name = recipe.draft(row.draft).paper
        low, high = (paper.lenient(name, value, row.temperature) for value in (first, last))
        if low is not None and high is not None:
            printed.append((high - low, end - start))
    reached = spanned([estimate(row.result["alphas"][-1]).value for row in rows])
    sentence = (
        f"At T={rows[0].temperature:g} alpha rises by {spanned(rises)} here from l = {first:g} to "
        f"{last:g}, to {reached}."
    )
    if not printed:
        return f"{sentence} {NO_COUNTERPART}"
    return (
        f"{sentence} In the paper it rises by {spanned([there for there, _ in printed])} on the "
        f"lines that have a counterpart, less than here in {sum(a < b for a, b in printed)} of "
        f"{len(printed)}. It must rise in both, as what is accepted only grows; by how much "
        "depends on how sharp both distributions are."
    )


def _draw(recipe: Recipe, rows: list[ResultRow], figure: Figure) -> None:
    """Ours with intervals; the paper's as dashes."""
    axes = figure.add_subplot()
    loose = [1 / value for value in recipe.lenience]
    lines: list[PlotLine] = []
    for draft in recipe.drafts:
        own = [row for row in rows if (row.draft, row.temperature) == (draft.label, 1)]
        alphas = [estimate(one) for row in own for one in row.result["alphas"]]
        printed = [paper.lenient(draft.paper, value, 1) for value in recipe.lenience]
        others = [(x, a) for x, a in zip(loose, printed, strict=True) if a is not None]
        lines.append(PlotLine(draft.label, list(zip(loose, alphas, strict=False)), others))
    plotted(axes, lines)
    axes.set_xscale("log")
    axes.set_xticks(loose, [f"1/{value:g}" for value in recipe.lenience])
    axes.minorticks_off()
    axes.set_ylim(0, 1)
    axes.set_xlabel("1 / lenience (dashed: the paper's)")
    axes.set_ylabel("alpha")
    axes.legend(frameon=False, fontsize="small")
