"""Observations of section 4, checked against the measurements here: each statement holds or does
not hold, with the numbers. Measures nothing itself."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from foretoken import theory
from foretoken.lab.estimate import Estimate
from foretoken_lab.experiments import acceptance, paper, walltime
from foretoken_lab.experiments.experiment import (
    Case,
    Found,
    Section,
    Table,
    done,
    estimate,
    plus_minus,
    told,
)
from foretoken_lab.recipes.pairs import Pairs
from foretoken_lab.recipes.recipe import Recipe

HEAD = ("", "the paper observes", "here", "numbers")
HOLDS, FAILS, OPEN = "holds", "does not hold", "within noise"
TRIVIAL = 0.01  # an alpha that is negligible


class Finding(NamedTuple):
    """A statement asked of one pair of numbers."""

    verdict: str
    numbers: str


def cases(recipe: Recipe) -> list[Case]:
    """None: rows of the other experiments are enough."""
    return []


def measure(pairs: Pairs, case: Case) -> dict[str, Any]:
    raise AssertionError(case)


def section(recipe: Recipe, results: Found) -> Section | None:
    """A line for each statement that something was measured for."""
    answers_to = {
        "the sharper the law, the higher alpha: T=0 above T=1": list(_sharper(recipe, results)),
        "alpha grows with the draft's size": list(_larger(recipe, results)),
        "drafts that are models have an alpha of 0.5 to 0.9": list(_between(recipe, results)),
        "unigram and bigram tables have an alpha that is not negligible": list(
            _trivial(recipe, results)
        ),
        "the smallest model is the fastest draft": list(_smallest(recipe, results)),
        "argmax (T=0) is sped up more than sampling (T=1)": list(_greedy_faster(recipe, results)),
        "some gamma gains where alpha > c, and none elsewhere (Corollary 3.9)": list(
            _improves(recipe, results)
        ),
        "measured speeds meet Theorem 3.8 as nearly as the paper's own": list(
            _theorem(recipe, results)
        ),
    }
    asked_of = [(statement, answers) for statement, answers in answers_to.items() if answers]
    if not asked_of:
        return None
    lines = [
        (str(i), statement, _verdict(answers), "; ".join(answer.numbers for answer in answers))
        for i, (statement, answers) in enumerate(asked_of, 1)
    ]
    verdicts = [verdict for _, _, verdict, _ in lines]
    hold, noisy, fail = (verdicts.count(each) for each in (HOLDS, OPEN, FAILS))
    paragraph = (
        f"Of the paper's observations {len(lines)} can be checked on these rows: {hold} hold in "
        f"every case, {fail} in none, {noisy} are within noise, "
        f"{len(lines) - hold - fail - noisy} hold in some cases. Two figures differ where "
        "their 95 % intervals do not overlap, and a figure is in a range, or outside, with all of "
        "its interval; otherwise they are within noise."
    )
    return Section(
        "Observations of section 4", [paragraph], [Table("What holds here", HEAD, lines)]
    )


def _verdict(answers: list[Finding]) -> str:
    verdicts = [answer.verdict for answer in answers]
    if len(set(verdicts)) == 1:
        return verdicts[0]
    noisy = f", {OPEN} in {verdicts.count(OPEN)}" if OPEN in verdicts else ""
    return f"{HOLDS} in {verdicts.count(HOLDS)} of {len(verdicts)}{noisy}"


def _above(one: Estimate, other: Estimate) -> str:
    """Tell whether the first is above the second, beyond both intervals."""
    if one.above(other):
        return HOLDS
    return FAILS if other.above(one) else OPEN


def _within(own: Estimate, low: float, high: float) -> str:
    """Tell whether it is between the two with all of its interval."""
    if low <= own.low and own.high <= high:
        return HOLDS
    return FAILS if own.high < low or high < own.low else OPEN


def _sharper(recipe: Recipe, results: Found) -> Iterator[Finding]:
    for draft in recipe.drafts:
        greedy = acceptance.known(results, draft.label, 0)
        sampled = acceptance.known(results, draft.label, 1)
        if greedy and sampled:
            numbers = f"{draft.label} {plus_minus(greedy)} and {plus_minus(sampled)}"
            yield Finding(_above(greedy, sampled), numbers)


def _larger(recipe: Recipe, results: Found) -> Iterator[Finding]:
    for temperature in recipe.temperatures:
        sized = [
            (row.result["parameters"], estimate(row.result["alpha"]), row.case["draft"])
            for row in done(results, "acceptance")
            if row.case["temperature"] == temperature and row.result["parameters"] is not None
        ]
        sized.sort(key=lambda one: one[0])
        for (small, low, name), (large, high, other) in zip(sized, sized[1:], strict=False):
            if small < large:
                numbers = (
                    f"T={temperature:g}: {other} ({large:,}) {plus_minus(high)} and {name} "
                    f"({small:,}) {plus_minus(low)}"
                )
                yield Finding(_above(high, low), numbers)


def _between(recipe: Recipe, results: Found) -> Iterator[Finding]:
    for row in done(results, "acceptance"):
        if recipe.draft(row.case["draft"]).is_model:
            own = estimate(row.result["alpha"])
            yield Finding(_within(own, 0.5, 0.9), f"{told(row)} {plus_minus(own)}")


def _trivial(recipe: Recipe, results: Found) -> Iterator[Finding]:
    for row in done(results, "acceptance"):
        if recipe.draft(row.case["draft"]).order in (1, 2):
            own = estimate(row.result["alpha"])
            yield Finding(HOLDS if own.low > TRIVIAL else FAILS, f"{told(row)} {plus_minus(own)}")


def _sizes(results: Found) -> dict[str, int]:
    """Parameters of the drafts that are models, where alpha was measured."""
    rows = done(results, "acceptance")
    return {
        row.case["draft"]: row.result["parameters"]
        for row in rows
        if row.result["parameters"] is not None
    }


def _smallest(recipe: Recipe, results: Found) -> Iterator[Finding]:
    sizes = _sizes(results)
    best = walltime.fastest(results).values()
    for temperature in recipe.temperatures:
        own = {
            row.case["draft"]: walltime.speed(row)
            for row in best
            if row.case["temperature"] == temperature and row.case["draft"] in sizes
        }
        if len(own) < 2:
            continue
        first, *others = sorted(own, key=lambda name: sizes[name])
        rival = max(others, key=lambda name: own[name].value)
        numbers = (
            f"T={temperature:g}: {first} {plus_minus(own[first], 2)}, the best of the others "
            f"{rival} {plus_minus(own[rival], 2)}"
        )
        yield Finding(_above(own[first], own[rival]), numbers)


def _greedy_faster(recipe: Recipe, results: Found) -> Iterator[Finding]:
    best = {key: walltime.speed(row) for key, row in walltime.fastest(results).items()}
    for draft in recipe.drafts:
        greedy, sampled = best.get((draft.label, 0)), best.get((draft.label, 1))
        if greedy and sampled:
            numbers = f"{draft.label} {plus_minus(greedy, 2)} and {plus_minus(sampled, 2)}"
            yield Finding(_above(greedy, sampled), numbers)


def _improves(recipe: Recipe, results: Found) -> Iterator[Finding]:
    for row in walltime.fastest(results).values():
        alpha, c = walltime.alpha(results, row), row.result["c"]
        if alpha is None or c is None:
            continue
        speed = walltime.speed(row)
        gains = HOLDS if speed.low > 1 else FAILS if speed.high < 1 else OPEN
        turned = {HOLDS: FAILS, FAILS: HOLDS, OPEN: OPEN}
        verdict = gains if theory.improves(alpha, c) else turned[gains]
        numbers = f"{told(row)}: alpha {alpha:.2f}, c {c:.2f}, {plus_minus(speed, 2)}"
        yield Finding(verdict, numbers)


def _theorem(recipe: Recipe, results: Found) -> Iterator[Finding]:
    """Within the paper's own spread of measured over expected."""
    theirs = [line.measured / line.expected for line in paper.TABLE_2]
    for row in walltime.fastest(results).values():
        expected = walltime.expected(results, row)
        if expected is None or not recipe.draft(row.case["draft"]).is_model:
            continue
        speed = walltime.speed(row)
        numbers = f"{told(row)}: {plus_minus(speed, 2)} for {expected:.2f}"
        verdict = _within(speed, min(theirs) * expected, max(theirs) * expected)
        yield Finding(verdict, numbers)
