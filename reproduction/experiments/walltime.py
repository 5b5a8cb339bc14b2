"""Tables 2 and 4: how many times faster than plain decoding, measured, and as Theorem 3.8 expects
it, by every draft, temperature and gamma; and with the paper's own c. Also the 1.25x of section
3.6: what a bigram table, whose draft tokens cost next to nothing, gains with gamma 3."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from foretoken import theory
from foretoken.measurement.estimate import Estimate, estimate_ratio
from foretoken.measurement.races import compare_with_plain
from reproduction.experiments import acceptance, beside_paper, paper
from reproduction.experiments.beside_paper import FigurePair
from reproduction.experiments.experiment import (
    ABOUT,
    Case,
    Columns,
    Experiment,
    Found,
    Plot,
    PlotLine,
    ResultRow,
    Section,
    done,
    estimate,
    plotted,
    plus_minus,
    rounded,
    tabulated,
)
from reproduction.pairs import Pairs
from reproduction.recipe import Recipe, RecipeDraft

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULE = "speculative"  # Algorithm 1, as the paper's
BUSY = 0.05  # of the processors: from here on other processes may have slowed a run


def cases(recipe: Recipe) -> list[Case]:
    """Every draft at every temperature with every gamma."""
    return [
        {"draft": draft.label, "temperature": temperature, "gamma": gamma}
        for draft in recipe.drafts
        for temperature in recipe.temperatures
        for gamma in recipe.gammas
    ]


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    """Plain and speculative runs in turn, prompt by prompt; medians over repeats, the interval over
    prompts. `alpha` is that of the draft tokens judged here."""
    spec, recipe = pairs.spec(case["draft"]), pairs.recipe
    options = {
        "temperature": case["temperature"],
        "gamma": case["gamma"],
        "max_new_tokens": recipe.max_new_tokens,
        "rule": RULE,
        "seed": recipe.seed,
    }
    comparisons = [
        compare_with_plain(spec, prompt, recipe.repeats, **options) for prompt in pairs.timed
    ]
    plain = [one.plain_seconds_per_token for one in comparisons]
    gained = estimate_ratio(plain, [one.seconds_per_token for one in comparisons], 0)
    assert gained is not None  # a recipe times two prompts or more
    drafted = [one for one in comparisons if one.alpha is not None]
    return {
        "speedup": asdict(gained),
        "slowest": min(one.speedup for one in comparisons),
        "seconds_per_token": fmean(one.seconds_per_token for one in comparisons),
        "plain_seconds_per_token": fmean(plain),
        "alpha": fmean(one.alpha or 0.0 for one in drafted) if drafted else None,
        "c": median(one.c or 0.0 for one in drafted) if drafted else None,
        "v": median(one.v or 1.0 for one in drafted) if drafted else None,
        "predicted": median(one.predicted or 1.0 for one in drafted) if drafted else None,
        "others": max((one.others or 0.0 for one in comparisons), default=0.0),
    }


def section(recipe: Recipe, results: Found) -> Section | None:
    """The fastest gamma of each draft at each temperature, beside the paper's."""
    rows, best = done(results, "walltime"), list(fastest(results).values())
    if not best:
        return None
    caption = (
        "Times faster than plain decoding, at the gamma that was fastest here; expected by "
        "Theorem 3.8 from alpha and c, and with v, what a pass over gamma + 1 tokens takes; the "
        "paper's is T5-XXL on a TPU-v4"
    )
    stars = {row.temperature: row for row in sorted(best, key=lambda row: speed(row).value)}
    table = tabulated(caption, best, _columns(recipe, results), lambda row: row in stars.values())
    return Section(
        "Tables 2 and 4: how much faster, measured and expected",
        _said(recipe, results, best),
        [table],
        [Plot("speed", "Speed over gamma, measured and as expected", partial(_draw, recipe, rows))],
    )


EXPERIMENT = Experiment(section, cases, measure)


def fastest(results: Found) -> dict[tuple[str, float], ResultRow]:
    """Return, for each draft at each temperature, the gamma that was fastest, in the order of the
    rows."""
    best: dict[tuple[str, float], ResultRow] = {}
    for row in done(results, "walltime"):
        key = row.draft, row.temperature
        if key not in best or speed(row).value > speed(best[key]).value:
            best[key] = row
    return best


def speed(row: ResultRow) -> Estimate:
    """Times plain decoding."""
    return estimate(row.result["speedup"])


def alpha(results: Found, row: ResultRow) -> float | None:
    """On the target's own text, or else of the draft tokens judged while it was timed."""
    own = acceptance.known(results, row.draft, row.temperature)
    return row.result["alpha"] if own is None else own.value


def expected(results: Found, row: ResultRow) -> float | None:
    """Theorem 3.8, of table 3's alpha where it was measured; None without alpha or c."""
    return _factor(alpha(results, row), row.case["gamma"], row.result["c"])


def _factor(alpha: float | None, gamma: int, c: float | None) -> float | None:
    return None if alpha is None or c is None else theory.walltime_factor(alpha, gamma, c)


def _printed(recipe: Recipe, row: ResultRow) -> paper.PrintedSpeed | None:
    return paper.speed(recipe.paper, recipe.draft(row.draft).paper, row.temperature)


def _columns(recipe: Recipe, results: Found) -> Columns[ResultRow]:
    def printed(name: str) -> Callable[[ResultRow], str]:
        def cell(row: ResultRow) -> str:
            line = _printed(recipe, row)
            return rounded(None if line is None else getattr(line, name))

        return cell

    def with_papers_c(row: ResultRow) -> str:
        c = recipe.draft(row.draft).c
        return rounded(_factor(alpha(results, row), row.case["gamma"], c))

    return {
        **ABOUT,
        "gamma": lambda row: str(row.case["gamma"]),
        "alpha": lambda row: rounded(alpha(results, row), 3),
        "c": lambda row: rounded(row.result["c"], 3),
        "v": lambda row: rounded(row.result["v"]),
        "expected": lambda row: rounded(expected(results, row)),
        "with v": lambda row: rounded(row.result["predicted"]),
        "measured": lambda row: plus_minus(speed(row), 2),
        "with the paper's c": with_papers_c,
        "paper: alpha": printed("alpha"),
        "paper: c": printed("c"),
        "paper: expected": printed("expected"),
        "paper: measured": printed("measured"),
    }


def _said(recipe: Recipe, results: Found, best: list[ResultRow]) -> list[str]:
    first = (
        f"Times of decoding without the prefill, batch 1, Algorithm 1; {recipe.timed} prompts of "
        f"up to {recipe.max_new_tokens} new tokens, plain and speculative runs in turn, "
        f"{recipe.repeats} of each. Intervals are over prompts."
    )
    if len(recipe.gammas) > 1:
        first += (
            f" The fastest of {len(recipe.gammas)} gammas is shown, by the same runs, so that a "
            "little of it is luck."
        )
    pairs = [
        FigurePair(row.draft, row.temperature, speed(row).value, line.measured)
        for row in best
        if (line := _printed(recipe, row)) is not None
    ]
    said = [first, beside_paper.speeds(pairs), *_reasons(recipe, results, best)]
    busy = max(row.result["others"] for row in best)
    if busy > BUSY:
        said.append(
            f"Other processes took up to {busy:.0%} of the processors meanwhile: these times are "
            "uncertain."
        )
    return said


def _reasons(recipe: Recipe, results: Found, best: list[ResultRow]) -> list[str]:
    """Compare measured speeds with the theorem's, v with 1, and c with the paper's."""
    shares = [speed(row).value / factor for row in best if (factor := expected(results, row))]
    with_v = [speed(row).value / factor for row in best if (factor := row.result["predicted"])]
    said = [beside_paper.theorem(shares, with_v)] if shares and with_v else []
    judged = [row for row in best if row.result["v"] is not None]
    if judged:
        slowest = max(judged, key=lambda row: row.result["v"])
        said.append(beside_paper.passes(slowest.result["v"], slowest.case["gamma"]))
    costs = [
        FigurePair(row.draft, row.temperature, row.result["c"], c)
        for row in best
        if (c := recipe.draft(row.draft).c) is not None and row.result["c"] is not None
    ]
    return said + beside_paper.costs(costs)


def _draw(recipe: Recipe, rows: list[ResultRow], figure: Figure) -> None:
    """A picture for each temperature: measured with intervals, expected as dashes."""
    temperatures = recipe.temperatures
    all_axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature in zip(all_axes, temperatures, strict=True):
        at = [row for row in rows if row.temperature == temperature]
        at.sort(key=lambda row: row.case["gamma"])
        lines: list[PlotLine] = []
        for draft in recipe.drafts:
            own = [(row.case["gamma"], row) for row in at if row.draft == draft.label]
            factors = [(g, _factor(row.result["alpha"], g, row.result["c"])) for g, row in own]
            points = [(gamma, speed(row)) for gamma, row in own]
            lines.append(PlotLine(draft.label, points, [(g, f) for g, f in factors if f]))
        plotted(axes, lines)
        axes.axhline(1, color="grey", lw=0.8)
        axes.set_xticks(sorted({row.case["gamma"] for row in rows}))
        axes.set_title(f"T={temperature:g}")
        axes.set_xlabel("gamma (dashed: Theorem 3.8)")
    all_axes[0].set_ylim(bottom=0)
    all_axes[0].set_ylabel("times plain decoding")
    all_axes[0].legend(frameon=False, fontsize="small")


def bigram_cases(recipe: Recipe) -> list[Case]:
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
    return draft.order == 2 or draft.paper == "Bigram"


def bigram_section(recipe: Recipe, results: Found) -> Section | None:
    """The rows beside the paper's claim."""
    gamma, c = paper.BIGRAM_GAMMA, 0.0
    rows = done(results, "bigram") + [
        row
        for row in done(results, "walltime")
        if row.case["gamma"] == gamma and _is_bigram(recipe.draft(row.draft))
    ]
    if not rows:
        return None
    columns: Columns[ResultRow] = {
        "T": ABOUT["T"],
        "alpha": lambda row: rounded(alpha(results, row), 3),
        "c": lambda row: rounded(row.result["c"], 3),
        "expected, c = 0": lambda row: rounded(_factor(alpha(results, row), gamma, c)),
        "expected": lambda row: rounded(expected(results, row)),
        "measured": lambda row: plus_minus(speed(row), 2),
    }
    claim = (
        f"The paper: alpha about {paper.BIGRAM_ALPHA:g} with T5-XXL and gamma {gamma} give "
        f"{paper.BIGRAM_SPEED:g}x. Theorem 3.8 with c = 0 gives "
        f"{theory.walltime_factor(paper.BIGRAM_ALPHA, gamma, c):.3f}x."
    )
    said = [
        beside_paper.bigram(
            row.temperature, rate, row.result["c"], row.result["v"] or 1.0, speed(row)
        )
        for row in rows
        if (rate := alpha(results, row)) is not None and row.result["c"] is not None
    ]
    table = tabulated(f"A bigram table with gamma {gamma}", rows, columns)
    return Section("Section 3.6: 1.25x by a bigram table", [claim, *said], [table])


BIGRAM = Experiment(bigram_section, bigram_cases, measure)
