"""Sections made of the other experiments' rows: the paper's observations of section 4, each of
which holds or does not hold here; drafts of kinds that the paper leaves open beside the fastest of
its own; and distilled drafts beside what they were before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from foretoken.measurement.estimate import Estimate
from reproduction.experiments import acceptance, paper, walltime
from reproduction.experiments.experiment import (
    ABOUT,
    BLANK,
    Columns,
    Experiment,
    Found,
    ResultRow,
    Section,
    Table,
    done,
    estimate,
    plus_minus,
    rounded,
    spanned,
    tabulated,
)
from reproduction.experiments.walltime import speed
from reproduction.recipe import Recipe
from reproduction.theory import improves

HOLDS, FAILS, OPEN = "holds", "does not hold", "within noise"
TRIVIAL = 0.01  # an alpha that is negligible
GAINS = "some gamma gains where alpha > c, and none elsewhere (Corollary 3.9)"
MEETS = "measured speeds meet Theorem 3.8 as nearly as the paper's own"
HEAD = ("", "the paper observes", "here", "numbers")
Values = dict[tuple[str, float], Estimate]  # by draft and temperature


class Finding(NamedTuple):
    """A statement asked of one pair of numbers."""

    verdict: str
    numbers: str


def section(recipe: Recipe, results: Found) -> Section | None:
    """A line for each statement that something was measured for."""
    agreed, timed = done(results, "acceptance"), list(walltime.fastest(results).values())
    models = [row for row in agreed if recipe.draft(row.draft).is_model]
    tables = [row for row in agreed if recipe.draft(row.draft).order in (1, 2)]
    alphas = {(row.draft, row.temperature): estimate(row.result["alpha"]) for row in agreed}
    speeds = {(row.draft, row.temperature): speed(row) for row in timed}
    sizes = {row.draft: row.result["parameters"] for row in agreed if row.result["parameters"]}
    answers_to = {
        "the sharper the distribution, the higher alpha: T=0 above T=1": _greedy_above(
            recipe, alphas, 3
        ),
        "alpha grows with the draft's size": _larger(recipe, alphas, sizes),
        "drafts that are models have an alpha of 0.5 to 0.9": _all_within(models, 0.5, 0.9),
        "unigram and bigram tables have an alpha that is not negligible": _all_within(
            tables, TRIVIAL, 1
        ),
        "the smallest model is the fastest draft": _smallest(recipe, speeds, sizes),
        "argmax (T=0) is sped up more than sampling (T=1)": _greedy_above(recipe, speeds, 2),
        GAINS: _improves(results, timed),
        MEETS: _theorem(recipe, results, timed),
    }
    asked = [(name, found) for name, answers in answers_to.items() if (found := list(answers))]
    if not asked:
        return None
    lines = [
        (str(i), name, _verdict(found), "; ".join(finding.numbers for finding in found))
        for i, (name, found) in enumerate(asked, 1)
    ]
    verdicts = [line[2] for line in lines]
    hold, fail, noisy = (verdicts.count(each) for each in (HOLDS, FAILS, OPEN))
    paragraph = (
        f"{len(lines)} of the paper's observations can be checked on these rows: {hold} hold in "
        f"every case, {fail} in none, {noisy} are within noise, "
        f"{len(lines) - hold - fail - noisy} hold in some cases. Two figures differ where "
        "their 95 % intervals do not overlap, and a figure is in a range, or outside, with all of "
        "its interval; otherwise they are within noise."
    )
    return Section(
        "Observations of section 4",
        [paragraph],
        [Table("The observations, checked here", HEAD, lines)],
    )


OBSERVATIONS = Experiment(section)


def _verdict(answers: list[Finding]) -> str:
    verdicts = [answer.verdict for answer in answers]
    if len(set(verdicts)) == 1:
        return verdicts[0]
    noisy = f", {OPEN} in {verdicts.count(OPEN)}" if OPEN in verdicts else ""
    return f"{HOLDS} in {verdicts.count(HOLDS)} of {len(verdicts)}{noisy}"


def _above(one: Estimate, other: Estimate) -> str:
    """Tell whether the first is above the second, beyond both intervals."""
    if one.is_above(other):
        return HOLDS
    return FAILS if other.is_above(one) else OPEN


def _within(own: Estimate, low: float, high: float) -> str:
    """Tell whether it is between the two with all of its interval."""
    if low <= own.low and own.high <= high:
        return HOLDS
    return FAILS if own.high < low or high < own.low else OPEN


def _greedy_above(recipe: Recipe, values: Values, digits: int) -> Iterator[Finding]:
    for draft in recipe.drafts:
        greedy, sampled = values.get((draft.label, 0)), values.get((draft.label, 1))
        if greedy and sampled:
            numbers = f"{plus_minus(greedy, digits)} and {plus_minus(sampled, digits)}"
            yield Finding(_above(greedy, sampled), f"{draft.label} {numbers}")


def _larger(recipe: Recipe, alphas: Values, sizes: dict[str, int]) -> Iterator[Finding]:
    ordered = sorted(sizes, key=lambda name: sizes[name])
    for temperature in recipe.temperatures:
        for small, large in zip(ordered, ordered[1:], strict=False):
            low, high = alphas.get((small, temperature)), alphas.get((large, temperature))
            if low and high and sizes[small] < sizes[large]:
                numbers = (
                    f"T={temperature:g}: {large} ({sizes[large]:,}) {plus_minus(high)} and {small} "
                    f"({sizes[small]:,}) {plus_minus(low)}"
                )
                yield Finding(_above(high, low), numbers)


def _all_within(rows: list[ResultRow], low: float, high: float) -> Iterator[Finding]:
    for row in rows:
        own = estimate(row.result["alpha"])
        yield Finding(_within(own, low, high), f"{row.told} {plus_minus(own)}")


def _smallest(recipe: Recipe, speeds: Values, sizes: dict[str, int]) -> Iterator[Finding]:
    for temperature in recipe.temperatures:
        own = {name: one for (name, at), one in speeds.items() if at == temperature}
        models = sorted(own.keys() & sizes.keys(), key=lambda name: sizes[name])
        if len(models) > 1:
            rival = max(models[1:], key=lambda name: own[name].value)
            numbers = (
                f"T={temperature:g}: {models[0]} {plus_minus(own[models[0]], 2)}, the best of the "
                f"others {rival} {plus_minus(own[rival], 2)}"
            )
            yield Finding(_above(own[models[0]], own[rival]), numbers)


def _improves(results: Found, timed: list[ResultRow]) -> Iterator[Finding]:
    for row in timed:
        alpha, c = walltime.alpha(results, row), row.result["c"]
        if alpha is not None and c is not None:
            own, even = speed(row), Estimate(1, 1, 1)
            pays = improves(alpha, c)
            numbers = f"{row.told}: alpha {alpha:.2f}, c {c:.2f}, {plus_minus(own, 2)}"
            yield Finding(_above(own, even) if pays else _above(even, own), numbers)


def _theorem(recipe: Recipe, results: Found, timed: list[ResultRow]) -> Iterator[Finding]:
    """Within the paper's own spread of measured over expected."""
    theirs = [line.measured / line.expected for line in paper.TABLE_2]
    for row in timed:
        expected = walltime.expected(results, row)
        if expected is not None and recipe.draft(row.draft).is_model:
            verdict = _within(speed(row), min(theirs) * expected, max(theirs) * expected)
            yield Finding(verdict, f"{row.told}: {plus_minus(speed(row), 2)} for {expected:.2f}")


def drafts_section(recipe: Recipe, results: Found) -> Section | None:
    """A table and a paragraph for each kind that the recipe has."""
    parts = [part for part in (_others(recipe, results), _distilled(recipe, results)) if part]
    if not parts:
        return None
    paragraphs, tables = zip(*parts, strict=True)
    return Section("Beyond the paper: other drafts", [*paragraphs], [*tables])


DRAFTS = Experiment(drafts_section)


def _others(recipe: Recipe, results: Found) -> tuple[str, Table] | None:
    """Describe the drafts that are neither a model of their own nor a table."""
    other = {d.label for d in recipe.drafts if not d.is_model and d.order is None}
    best = list(walltime.fastest(results).values())
    rows = [row for row in best if row.draft in other]
    if not rows:
        return None

    def fastest_rival(row: ResultRow) -> ResultRow | None:
        rivals = [r for r in best if r.temperature == row.temperature and r.draft not in other]
        return max(rivals, key=lambda r: speed(r).value, default=None)

    def rival(row: ResultRow) -> str:
        fastest = fastest_rival(row)
        return f"{fastest.draft} {plus_minus(speed(fastest), 2)}" if fastest else BLANK

    columns: Columns[ResultRow] = {
        **ABOUT,
        "alpha": lambda row: plus_minus(acceptance.known(results, row.draft, row.temperature)),
        "c": lambda row: rounded(row.result["c"], 3),
        "gamma": lambda row: str(row.case["gamma"]),
        "times plain decoding": lambda row: plus_minus(speed(row), 2),
        "of the paper's kinds": rival,
    }
    caption = "Drafts of other kinds, at the gamma that was fastest"
    return _said_of_others(rows, [fastest_rival(row) for row in rows]), tabulated(
        caption, rows, columns
    )


def _said_of_others(rows: list[ResultRow], rivals: list[ResultRow | None]) -> str:
    speeds = [speed(row) for row in rows]
    faster, slower = sum(one.low > 1 for one in speeds), sum(one.high < 1 for one in speeds)
    sentence = (
        "These drafts are of kinds that the paper does not measure. They run at "
        f"{spanned([one.value for one in speeds])} times the speed of plain decoding: faster in "
        f"{faster} of {len(rows)} cases, slower in {slower}, within noise in "
        f"{len(rows) - faster - slower}. A draft that copies has no draft token where nothing "
        "repeats, which counts as 0 in alpha."
    )
    beaten = [
        own.is_above(speed(rival)) for own, rival in zip(speeds, rivals, strict=True) if rival
    ]
    if not beaten:
        return sentence
    return (
        f"{sentence} They beat the fastest draft of the paper's kinds beyond both intervals in "
        f"{sum(beaten)} of {len(beaten)} cases."
    )


def _distilled(recipe: Recipe, results: Found) -> tuple[str, Table] | None:
    """Drafts that were taught by the target, where their selves before are in the recipe."""
    best = walltime.fastest(results)
    gaps: list[tuple[Estimate, Estimate]] = []
    ratios: list[float] = []
    lines: list[tuple[str, ...]] = []
    taught = [draft for draft in recipe.drafts if draft.distilled_from]
    for draft, temperature in ((d, t) for d in taught for t in recipe.temperatures):
        labels = str(draft.distilled_from), draft.label
        before, after = (acceptance.known(results, label, temperature) for label in labels)
        if before is not None and after is not None:
            gaps.append((before, after))
            rows = [best.get((label, temperature)) for label in labels]
            speeds = [speed(row) if row else None for row in rows]
            ratios += [speeds[1].value / speeds[0].value] if speeds[0] and speeds[1] else []
            cells = *map(plus_minus, (before, after)), *(plus_minus(one, 2) for one in speeds)
            lines.append((draft.label, f"{temperature:g}", *cells))
    if not lines:
        return None
    head = ("draft", "T", "alpha before", "after", "times plain decoding before", "after")
    caption = "Drafts before and after they were distilled"
    return _said_of_distilling(gaps, ratios), Table(caption, head, lines)


def _said_of_distilling(alphas: list[tuple[Estimate, Estimate]], ratios: list[float]) -> str:
    """`alphas`: before and after; `ratios`: speed after over speed before."""
    gaps = [after.value - before.value for before, after in alphas]
    higher = sum(after.is_above(before) for before, after in alphas)
    lower = sum(before.is_above(after) for before, after in alphas)
    sentence = (
        "Distilling (training on the target's distributions) changes alpha by "
        f"{spanned(gaps, 3, sign=True)}: in {higher} of {len(alphas)} cases it is higher beyond "
        f"both intervals, in {lower} lower."
    )
    if not ratios:
        return sentence
    return (
        f"{sentence} The draft's costs stay as they were, so speed can only follow alpha: it is "
        f"{spanned(ratios)} times what it was."
    )
