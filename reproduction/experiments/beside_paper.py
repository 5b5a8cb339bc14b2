"""Sentences that set figures measured here beside the paper's: by how much they differ, in how many
cases they agree, and what stands between them. All are computed from the figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations
from statistics import median
from typing import NamedTuple

from foretoken import theory
from foretoken.measurement.estimate import Estimate
from reproduction.experiments import paper
from reproduction.experiments.experiment import plus_minus, spanned

NO_COUNTERPART = "The paper's table has no counterpart of these drafts."
SAME_PASS, SAME_COST = 1.1, 1.5  # times: up to here v and c count as the paper's


class FigurePair(NamedTuple):
    """One figure of a draft at a temperature, here and in the paper."""

    draft: str
    temperature: float
    here: float
    paper: float


def alphas(pairs: Sequence[FigurePair]) -> list[str]:
    """Say by how much alpha differs from table 3, and how many pairs agree in their order."""
    if not pairs:
        return [NO_COUNTERPART]
    by_gap = sorted(pairs, key=lambda pair: pair.here - pair.paper)
    low, high = (
        f"{pair.here - pair.paper:+.2f} ({pair.draft}, T={pair.temperature:g})"
        for pair in (by_gap[0], by_gap[-1])
    )
    same = [
        (one.here - other.here) * (one.paper - other.paper) > 0
        for one, other in combinations(pairs, 2)
        if one.temperature == other.temperature and one.paper != other.paper
    ]
    order = (
        f"{sum(same)} of {len(same)} pairs of drafts at one temperature come in the order that "
        f"they have in the paper, {len(same) - sum(same)} do not."
        if same
        else "No two of these drafts could differ in their order at one temperature."
    )
    return [
        f"Against the paper's figures ours lie between {low} and {high}. Other models, trained on "
        "other text, have other alphas; their order is what can agree.",
        order,
    ]


def speeds(pairs: Sequence[FigurePair]) -> str:
    """Compare measured speeds with those of tables 2 and 4."""
    if not pairs:
        return NO_COUNTERPART
    return (
        f"Measured are {spanned([pair.here for pair in pairs])} times plain decoding, in the paper "
        f"{spanned([pair.paper for pair in pairs], 1)} on the lines that have a counterpart: ours "
        f"is lower in {sum(pair.here < pair.paper for pair in pairs)} of {len(pairs)}. Three "
        "numbers stand between the two: alpha, c and v."
    )


def theorem(over_expected: Sequence[float], over_predicted: Sequence[float]) -> str:
    """Compare measured over expected speed with table 4; also where the measured v is expected."""
    theirs = [line.measured / line.expected for line in paper.TABLE_2]
    inside = sum(min(theirs) <= share <= max(theirs) for share in over_expected)
    here, there, with_v = (
        f"{spanned(shares)}, median {median(shares):.2f}"
        for shares in (over_expected, theirs, over_predicted)
    )
    return (
        f"Measured over what Theorem 3.8 expects: {here} here, {there} in the paper's table 4, "
        f"within whose range {inside} of {len(over_expected)} of ours lie. With the measured v, "
        f"which the theorem takes as 1: {with_v}."
    )


def passes(v: float, gamma: int) -> str:
    """Tell how far from the theorem's 1 the largest v is, and why."""
    if v < SAME_PASS:
        return (
            f"A forward pass over gamma + 1 tokens takes at most {v:.2f} times one over a single "
            "token (v), so that the theorem's assumption, 1, holds here."
        )
    return (
        "The theorem assumes that a forward pass over gamma + 1 tokens costs as much as one over a "
        f"single token. Here it takes up to {v:.2f} times as long (v, gamma {gamma}). The paper's "
        "accelerator computes the further tokens while it waits for memory, at batch 1; this "
        "processor needs time for them, which lowers what is measured below what is expected."
    )


def costs(pairs: Sequence[FigurePair]) -> list[str]:
    """Name the c that is farthest above the paper's, and why."""
    if not any(pair.paper for pair in pairs):
        return []
    pair = max((pair for pair in pairs if pair.paper), key=lambda pair: pair.here / pair.paper)
    times = pair.here / pair.paper
    reason = (
        "A small model's forward pass is mostly the call, not its arithmetic, so the drafts of a "
        "small target are dear; with the paper's c the same alpha gives the factors in the column "
        "beside."
        if times > SAME_COST
        else "So costs are as in the paper, and speeds differ by alpha and v alone."
    )
    return [
        f"c of {pair.draft} is {pair.here:.3f} here and {pair.paper:g} in the paper, {times:.1f} "
        f"times. {reason}"
    ]


def bigram(temperature: float, alpha: float, c: float, v: float, speed: Estimate) -> str:
    """Say if the table gains, and what stands between section 3.6's claim and the clock."""
    free = theory.walltime_factor(alpha, paper.BIGRAM_GAMMA, 0)
    verdict = "gains" if speed.low > 1 else "loses" if speed.high < 1 else "neither gains nor loses"
    sentence = (
        f"At T={temperature:g} alpha is {alpha:.2f} here, for which the theorem expects "
        f"{free:.2f}x; measured is {plus_minus(speed, 2)}, so the table {verdict}."
    )
    if speed.value >= free or v <= 1:
        return sentence
    return (
        f"{sentence} The difference is due to c = {c:.3f} and to a forward pass over four tokens, "
        f"which takes {v:.2f} times one over a single token here and counts as 1 in the theorem."
    )
