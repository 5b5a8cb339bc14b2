"""Costs: tables from step records, between and beyond their points."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from foretoken.costing import costs
from foretoken.costing.costs import (
    Costs,
    LongContextCosts,
    classify_sampling,
    costs_from_steps,
    interpolate,
    select_costliest,
)
from foretoken.costing.gamma import AcceptanceEstimate, allot_gammas, make_cost_table
from foretoken.records import StepRecord
from foretoken.sampling.distributions import SamplingParams


def record(drafted: int, draft=0.0, score=1.0, verify=0.0) -> StepRecord:
    x = (0,) * drafted
    return StepRecord(drafted, x, 0, (1,), (0.5,) * drafted, drafted, draft, score, verify, 1)


KNOWN = Costs(((0, 0.0), (4, 0.8)), ((1, 2.0), (5, 3.0)), ((1, 0.0), (5, 0.2)))


def test_a_table_is_straight_between_its_points_and_beyond():
    table = ((1, 1.0), (2, 3.0), (4, 5.0))
    assert [interpolate(table, x) for x in (0, 1, 2, 3, 4, 6)] == [1, 1, 3, 4, 5, 7]
    assert interpolate(((1, 2.0), (2, 1.0)), 9) == 1  # noise: it does not fall for ever
    assert interpolate(((3, 7.0),), 1) == interpolate(((3, 7.0),), 9) == 7


def test_tables_are_typical_times_by_number_of_draft_tokens():
    steps = [record(0, score=s) for s in (9.0, 1.0, 2.0, 2.0, 1.0)]
    steps += [record(4, 0.8, 3.0, 0.2), record(4, 1.6, 99.0, 0.2), record(4, 0.4, 3.0, 0.2)]
    measured = costs.costs_from_steps(steps)
    assert measured == Costs(((0, 0.0), (4, 0.8)), ((1, 2.0), (5, 3.0)), ((1, 0.0), (5, 0.2)))


def test_a_longer_text_costs_more_in_proportion():
    far = LongContextCosts(1100, ((0, 0.0), (4, 1.2)), ((1, 2.5), (5, 5.0)))
    longer = replace(KNOWN, context=100, far=far)
    assert costs.costs_at_context(longer, 100) == costs.costs_at_context(longer, 0) == longer
    assert costs.costs_at_context(KNOWN, 9999) == KNOWN
    there = costs.costs_at_context(longer, 600)
    assert there.score == ((1, 2.25), (5, 4.0)) and there.draft == ((0, 0.0), (4, 1.0))
    beyond = costs.costs_at_context(longer, 2100)
    assert beyond.score == ((1, 3.0), (5, 7.0)) and beyond.verify == KNOWN.verify
    shared = costs.costs_at_context(
        longer, 1100, batch_size=2
    )  # each of the two has as many tokens as alone
    assert shared.score == ((1, 3.0), (5, 3.0 + 2 * (0.5 + 1.5 * 3 / 8)))
    assert longer.is_valid and not replace(longer, context=1100).is_valid


def test_a_draft_that_attends_to_few_tokens_costs_no_more_beyond_them():
    far = LongContextCosts(1100, ((0, 0.0), (4, 1.2)), ((1, 2.5), (5, 5.0)), draft_limit=1600)
    longer = replace(KNOWN, context=100, far=far)
    unlimited = replace(longer, far=replace(far, draft_limit=None))
    for context in (600, 1600, 2100):
        there, other = (costs.costs_at_context(each, context) for each in (longer, unlimited))
        assert there.score == other.score
        assert (there.draft == other.draft) == (context <= 1600)
    assert costs.costs_at_context(longer, 9999).draft == ((0, 0.0), (4, pytest.approx(1.4)))


def test_rows_that_share_a_pass():
    steps = [record(0, score=4.0), record(3, 1.2, 9.0)]
    measured = KNOWN.extend_to_batch(steps, [0, 24], batch_size=8)
    assert measured.score == ((1, 2.0), (5, 3.0), (8, 4.0), (32, 9.0))
    assert measured.rows == ((1, 1.0), (8, pytest.approx(2.0)))
    assert measured.step_seconds(3, 8) == pytest.approx(1.2 + 9)
    assert measured.step_seconds(4, 1) == KNOWN.step_seconds(4)
    alone = measured.step_seconds(3, 4)
    assert KNOWN.step_seconds(3) < alone < measured.step_seconds(3, 8)


def test_a_pass_of_several_rows_takes_no_longer_than_a_larger_one_of_a_single_row():
    """The pass of a lone row over five tokens was disturbed: it lies between its neighbours."""
    measured = KNOWN.extend_to_batch(
        [record(0, score=2.5), record(3, 1.2, 9.0)], [0, 24], batch_size=8
    )
    assert measured.score == ((1, 2.0), (5, 2 + 4 / 14), (8, 2.5), (32, 9.0))


def test_a_disturbed_pass_makes_no_draft_token_free():
    """Neither those up to the next size, nor those beyond the last one."""
    steps = [record(0, score=2.6), record(1, 1.2, 4.5), record(1, 1.2, 9.0), record(3, 1.2, 6.8)]
    measured = KNOWN.extend_to_batch(steps, [0, 16, 24, 48], batch_size=16)
    assert measured.score[-3:] == ((32, 4.5), (40, 4.5 + 2.3 / 4), (64, 6.8))
    assert measured.target_seconds(128, 0) - measured.target_seconds(64, 0) == pytest.approx(
        2 * 2.3
    )


def test_a_disturbed_first_pass_does_not_make_the_first_draft_token_free():
    steps = [record(n - 1, score=seconds) for n, seconds in ((1, 5.0), (2, 3.0), (8, 6.0))]
    assert costs_from_steps(steps).score == ((1, 2.5), (2, 3.0), (8, 6.0))


def test_a_disturbed_first_pass_does_not_seem_free_either():
    """Of a steep table; c and v are relative to it."""
    steps = [record(n - 1, score=seconds) for n, seconds in ((1, 9.0), (4, 2.0), (5, 3.0))]
    assert costs_from_steps(steps).score == ((1, 0.5), (4, 2.0), (5, 3.0))


@pytest.mark.parametrize(
    "broken",
    [
        {"draft": ()},
        {"verify": ((1, -1.0),)},
        {"score": ((2, 1.0), (1, 1.0))},
        {"score": ((1, 0.0), (5, 1.0))},
        {"rows": ((1, 0.0),)},
        {"score": ((1, math.nan),)},
        {"prior": (0.0, 0.5)},
        {"prior": (3.0, 1.5)},
        {"change": -1.0},
    ],
)
def test_what_cannot_be_costs(broken):
    assert KNOWN.is_valid and not replace(KNOWN, **broken).is_valid


def test_a_clock_that_stood_still_gives_no_pass_for_nothing():
    measured = costs.costs_from_steps([record(0, score=0.0), record(4, score=0.0)])
    assert measured.step_seconds(0) > 0 and measured.v(5) == 1 and measured.c == 0
    assert measured.is_valid
    assert allot_gammas(
        [AcceptanceEstimate(measured.prior)], [4], make_cost_table(measured, 1)
    ) == [4]


def test_kinds_of_sampling():
    assert (
        classify_sampling(SamplingParams())
        == classify_sampling(SamplingParams(top_k=3))
        == "greedy"
    )
    assert (
        classify_sampling(SamplingParams(0.7))
        == classify_sampling(SamplingParams(1.0))
        == "sampled"
    )
    for more in ({"top_k": 3}, {"top_p": 0.9}, {"min_p": 0.1}):
        assert classify_sampling(SamplingParams(1.0, **more)) == "sampled"


def test_the_dearest_of_several_distributions_without_their_controls() -> None:
    greedy, plain = SamplingParams(repetition_penalty=2.0), SamplingParams(0.5, logprobs=1)
    cut = SamplingParams(1.0, typical_p=0.9, stop_strings="x")
    assert [classify_sampling(p) for p in (greedy, plain, cut)] == ["greedy", "sampled", "sampled"]
    assert select_costliest([greedy, plain]).standard == SamplingParams(0.5).standard
    assert select_costliest([greedy, plain]).logprobs is None
    assert select_costliest([cut, greedy, plain]).typical_p == 0.9
