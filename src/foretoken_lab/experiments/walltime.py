"""Tables 2 and 4: how many times faster than plain decoding, measured, and as Theorem 3.8 expects
it, by every draft, temperature and gamma; and with the paper's own c."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

from foretoken import theory
from foretoken.lab.bench import compare
from foretoken.lab.estimate import Estimate, ratio
from foretoken_lab.experiments import acceptance, paper
from foretoken_lab.experiments.experiment import (
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
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe

if TYPE_CHECKING:
    from matplotlib.figure import Figure

RULE = "speculative"  # Algorithm 1, as the paper's
HEAD = (
    "draft",
    "T",
    "gamma",
    "alpha",
    "c",
    "v",
    "expected",
    "with v",
    "measured",
    "with the paper's c",
    "paper: alpha",
    "c",
    "expected",
    "measured",
)


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
    comparisons = [compare(spec, prompt, recipe.repeats, **options) for prompt in pairs.timed]
    plain = [one.plain_seconds_per_token for one in comparisons]
    gained = ratio(plain, [one.seconds_per_token for one in comparisons], 0)
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
    rows = done(results, "walltime")
    if not rows:
        return None
    best = list(fastest(results).values())
    caption = (
        "Times faster than plain decoding, at the gamma that was fastest here; expected by "
        "Theorem 3.8 from alpha and c, and with v, what a pass over gamma + 1 tokens takes; the "
        "paper's is T5-XXL on a TPU-v4"
    )
    lines = [_line(recipe, results, row) for row in best]
    stars = {
        row.case["temperature"]: row for row in sorted(best, key=lambda row: speed(row).value)
    }  # the last is kept
    emphasized = frozenset(i for i, row in enumerate(best) if row in stars.values())
    return Section(
        "Tables 2 and 4: how much faster, measured and expected",
        _paragraphs(recipe, results, best),
        [without_blanks(Table(caption, HEAD, lines, emphasized))],
        [Plot("speed", "Speed over gamma, measured and as expected", partial(_draw, recipe, rows))],
    )


def fastest(results: Found) -> dict[tuple[str, float], ResultRow]:
    """Return, for each draft at each temperature, the gamma that was fastest, in the order of the
    rows."""
    best: dict[tuple[str, float], ResultRow] = {}
    for row in done(results, "walltime"):
        key = row.case["draft"], row.case["temperature"]
        if key not in best or speed(row).value > speed(best[key]).value:
            best[key] = row
    return best


def speed(row: ResultRow) -> Estimate:
    """Times plain decoding."""
    return estimate(row.result["speedup"])


def expected(results: Found, row: ResultRow) -> float | None:
    """Theorem 3.8, of table 3's alpha where it was measured; None without alpha or c."""
    rate, c = alpha(results, row), row.result["c"]
    return None if rate is None or c is None else theory.walltime_factor(rate, row.case["gamma"], c)


def alpha(results: Found, row: ResultRow) -> float | None:
    """On the target's own text, or else of the draft tokens judged while it was timed."""
    own = acceptance.known(results, row.case["draft"], row.case["temperature"])
    return row.result["alpha"] if own is None else own.value


def _line(recipe: Recipe, results: Found, row: ResultRow) -> tuple[str, ...]:
    draft, result, gamma = recipe.draft(row.case["draft"]), row.result, row.case["gamma"]
    rate = alpha(results, row)
    with_c = None
    if draft.c is not None and rate is not None:
        with_c = theory.walltime_factor(rate, gamma, draft.c)
    printed = _printed(recipe, row)
    theirs = (None,) * 4
    if printed is not None:
        theirs = (printed.alpha, printed.c, printed.expected, printed.measured)
    return (
        draft.label,
        f"{row.case['temperature']:g}",
        str(gamma),
        rounded(rate, 3),
        rounded(result["c"], 3),
        rounded(result["v"]),
        rounded(expected(results, row)),
        rounded(result["predicted"]),
        plus_minus(speed(row), 2),
        rounded(with_c),
        *map(rounded, theirs),
    )


def _paragraphs(recipe: Recipe, results: Found, best: list[ResultRow]) -> list[str]:
    busy = max(row.result["others"] for row in best)
    return [
        f"Times of decoding without the prefill, batch 1, Algorithm 1; {recipe.timed} prompts of "
        f"up to {recipe.max_new_tokens} new tokens, plain and speculative runs in turn, "
        f"{recipe.repeats} of each. Intervals are over prompts. Of several gammas the fastest is "
        f"shown, by the same runs, so that a little of it is luck. Other processes took up to "
        f"{busy:.0%} of the processors meanwhile.",
        "Three numbers stand between these speeds and the paper's: alpha, c and v. c is the time "
        "of a draft's forward pass over the target's. A small model's is mostly the call, not its "
        "arithmetic, so the drafts of a small target are dear; with the paper's c the same alpha "
        "gives the factors in the column beside. v is the time of a forward pass over gamma + 1 "
        "tokens over that of one over a single token, which the theorem takes as 1. The paper's "
        "accelerator computes the further tokens while it waits for memory, at batch 1; a "
        "processor needs time for them, which lowers what is measured below what is expected.",
        *_theorem(results, best),
    ]


def _theorem(results: Found, best: list[ResultRow]) -> list[str]:
    """Measured over expected, here and in the paper."""
    shares = [speed(row).value / factor for row in best if (factor := expected(results, row))]
    with_v = [speed(row).value / v for row in best if (v := row.result["predicted"])]
    if not shares or not with_v:
        return []
    theirs = [line.measured / line.expected for line in paper.TABLE_2]
    inside = sum(min(theirs) <= share <= max(theirs) for share in shares)
    return [
        f"Measured over what Theorem 3.8 expects: {_span(shares)} here, {_span(theirs)} in the "
        f"paper's table 4, within whose range {inside} of {len(shares)} of ours lie. With the "
        f"measured v, which the theorem takes as 1: {_span(with_v)}."
    ]


def _draw(recipe: Recipe, rows: list[ResultRow], figure: Figure) -> None:
    """A picture for each temperature: measured with intervals, expected as dashes."""
    temperatures = recipe.temperatures
    all_axes = figure.subplots(1, len(temperatures), sharey=True, squeeze=False)[0]
    for axes, temperature in zip(all_axes, temperatures, strict=True):
        for i, draft in enumerate(recipe.drafts):
            own = [
                row
                for row in rows
                if (row.case["draft"], row.case["temperature"]) == (draft.label, temperature)
            ]
            own.sort(key=lambda row: row.case["gamma"])
            gammas = [row.case["gamma"] for row in own]
            speeds = [speed(row) for row in own]
            errors = [one.error for one in speeds]
            values = [one.value for one in speeds]
            style: dict[str, Any] = {"color": f"C{i}", "label": draft.label}
            axes.errorbar(gammas, values, errors, marker="o", ms=3, lw=1.2, capsize=2, **style)
            points = [(g, e) for g, row in zip(gammas, own, strict=True) if (e := _theory(row))]
            if points:
                axes.plot(*zip(*points, strict=True), ls="--", lw=1, color=f"C{i}")
        axes.axhline(1, color="grey", lw=0.8)
        axes.set_xticks(sorted({row.case["gamma"] for row in rows}))
        axes.set_title(f"T={temperature:g}")
        axes.set_xlabel("gamma (dashed: Theorem 3.8)")
        axes.spines[["top", "right"]].set_visible(False)
    all_axes[0].set_ylim(bottom=0)
    all_axes[0].set_ylabel("times plain decoding")
    all_axes[0].legend(frameon=False, fontsize="small")


def _printed(recipe: Recipe, row: ResultRow) -> paper.PrintedSpeed | None:
    """The paper's line."""
    name = recipe.draft(row.case["draft"]).paper
    return paper.speed(recipe.paper, name, row.case["temperature"])


def _theory(row: ResultRow) -> float | None:
    alpha, c = row.result["alpha"], row.result["c"]
    return None if alpha is None else theory.walltime_factor(alpha, row.case["gamma"], c)


def _span(values: list[float]) -> str:
    return f"{min(values):.2f} to {max(values):.2f}, median {median(values):.2f}"
