"""Sentences beside the paper's figures: by figures that agree with them, and by others."""

from __future__ import annotations

import pytest

from foretoken.measurement.estimate import Estimate
from reproduction.experiments import beside_paper
from reproduction.experiments.beside_paper import NO_COUNTERPART, FigurePair


def pairs(*figures: tuple[float, float]) -> list[FigurePair]:
    """Drafts a, b, ... at T=0, here and in the paper."""
    return [FigurePair("abcd"[i], 0.0, here, printed) for i, (here, printed) in enumerate(figures)]


def test_alphas_differ_and_come_in_the_papers_order_or_not():
    difference, order = beside_paper.alphas(pairs((0.7, 0.75), (0.8, 0.7), (0.9, 0.8)))
    assert "between -0.05 (a, T=0) and +0.10 (b, T=0)" in difference
    assert order.startswith("2 of 3 pairs") and order.endswith("1 do not.")  # a and b are not
    assert "1 of 1 pairs" in beside_paper.alphas(pairs((0.3, 0.1), (0.4, 0.2)))[1]


def test_an_order_needs_one_temperature_and_two_figures():
    apart = [FigurePair("a", 0.0, 0.5, 0.6), FigurePair("b", 1.0, 0.4, 0.7)]
    assert "No two" in beside_paper.alphas(apart)[1]
    assert "No two" in beside_paper.alphas(pairs((0.5, 0.6), (0.4, 0.6)))[1]
    assert beside_paper.alphas([]) == [NO_COUNTERPART]


def test_speeds_are_lower_or_not():
    said = beside_paper.speeds(pairs((1.3, 3.4), (1.9, 1.4)))
    assert "1.30 to 1.90 times plain decoding, in the paper 1.4 to 3.4" in said
    assert "lower in 1 of 2" in said
    assert beside_paper.speeds([]) == NO_COUNTERPART


def test_measured_over_expected_stands_beside_the_papers_range():
    said = beside_paper.theorem([0.5, 0.8, 1.3], [0.9])
    assert "0.50 to 1.30, median 0.80 here, 0.68 to 1.29, median 1.08 in the paper" in said
    assert "range 1 of 3 of ours lie" in said and "as 1: 0.90, median 0.90." in said
    assert "range 2 of 2 of ours lie" in beside_paper.theorem([0.7, 1.0], [1.0])


def test_a_longer_forward_pass_costs_as_much_or_more():
    assert "at most 1.05 times" in beside_paper.passes(1.05, 3)
    assert "up to 1.66 times as long (v, gamma 5)" in beside_paper.passes(1.66, 5)


def test_costs_are_the_papers_or_not():
    (dear,) = beside_paper.costs(pairs((0.4, 0.02), (0.1, 0.1), (0.2, 0.0)))
    assert "c of a is 0.400 here and 0.02 in the paper, 20.0 times" in dear and "dear" in dear
    (same,) = beside_paper.costs(pairs((0.12, 0.1)))
    assert "1.2 times. So costs are as in the paper" in same
    assert beside_paper.costs([]) == [] == beside_paper.costs(pairs((0.1, 0.0)))


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(1.1, 1.3, "gains"), (0.7, 0.9, "loses"), (0.9, 1.1, "neither gains nor loses")],
)
def test_a_bigram_table_gains_or_loses(low, high, verdict):
    said = beside_paper.bigram(1.0, 0.2, 0.01, 1.3, Estimate((low + high) / 2, low, high))
    assert f"so the table {verdict}." in said and "expects 1.25x" in said
    assert "due to c = 0.010" in said and "1.30 times one over a single token" in said


def test_a_bigram_table_as_fast_as_expected_has_no_difference():
    assert "difference" not in beside_paper.bigram(0.0, 0.2, 0.0, 1.3, Estimate(1.3, 1.2, 1.4))
    assert "difference" not in beside_paper.bigram(0.0, 0.2, 0.0, 1.0, Estimate(1.1, 1.0, 1.2))
