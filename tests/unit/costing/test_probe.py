"""The probe: real steps at several gammas, with any drafter, and nothing left behind."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from foretoken.costing.probe import (
    LONG_CONTEXT_DRAFT_SIZES,
    LONG_CONTEXT_TOKENS,
    PROBE_TOKENS,
    SINGLE_DRAFT_SIZES,
    _compare_halves,
    list_shared_draft_sizes,
    probe,
    probe_shared,
)
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.lookup import LookupDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.engine.batch import Batch
from foretoken.records import StepRecord
from foretoken.request import Request
from foretoken.sampling.distributions import SamplingParams
from foretoken.sampling.keys import SequenceKey
from oracle import random_model
from table import Distribution, TableModel

pytestmark = pytest.mark.daily

V = 6
SAMPLED = SamplingParams(temperature=1.0)


def engine(drafter=None, context: int | None = None) -> Batch:
    target = TableModel(random_model(1, V), V, context=context)
    return Batch(target, drafter or LMDrafter(TableModel(random_model(2, V), V), V))


def request(tokens: int = PROBE_TOKENS) -> Request:
    return Request([1, 2], tokens, SequenceKey(0, 0))


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams()], ids=["sampled", "greedy"])
@pytest.mark.parametrize(
    "drafter", [None, LookupDrafter(), NoDrafter()], ids=["model", "lookup", "none"]
)
def test_every_gamma_is_measured_whatever_the_drafter_finds(drafter, params):
    e = engine(drafter)
    measured = probe(e, request(), params).costs
    assert [g for g, _ in measured.draft] == list(SINGLE_DRAFT_SIZES)
    assert (
        [n for n, _ in measured.score]
        == [n for n, _ in measured.verify]
        == [g + 1 for g in SINGLE_DRAFT_SIZES]
    )
    assert all(seconds > 0 for _, seconds in measured.score)
    assert e.target._texts == []


@pytest.mark.parametrize("params", [SAMPLED, SamplingParams()], ids=["sampled", "greedy"])
def test_what_follows_an_end_of_the_text_says_nothing_of_the_draft(params):
    """Behind id 5 both repeat it for ever; before it, for 6 tokens, they never agree."""

    def distribution(own: int) -> Distribution:
        def at(text: Sequence[int]) -> list[float]:
            return [float(i == (own if len(text) < 8 else 5)) for i in range(V)]

        return at

    e = Batch(TableModel(distribution(1), V), LMDrafter(TableModel(distribution(2), V), V))
    measured = probe(e, request(), params, frozenset({5})).costs
    # to 3 draft tokens of 0.8 come two that are refused, in steps of one each, and the end itself
    assert measured.prior == (6, pytest.approx((2.4 + 1) / 6))
    endless = probe(e, request(), params).costs
    assert endless.prior[1] > 0.9


@pytest.mark.parametrize(
    ("rows", "padded", "sizes"),
    [
        (1, False, (0, 1, 3)),
        (2, False, (0, 1, 2, 6)),
        (16, False, (0, 8, 16, 48)),
        (16, True, (0, 16, 32, 64, 128)),
    ],
)
def test_draft_tokens_of_rows_together(rows, padded, sizes):
    assert list_shared_draft_sizes(rows, padded) == sizes


def test_rows_that_share_a_pass():
    e = engine()
    alone = probe(e, request(), SAMPLED).costs
    measured = probe_shared(alone, e, request(), SAMPLED, batch_size=4).costs
    sizes = {4, 6, 8, 16} | {g + 1 for g in SINGLE_DRAFT_SIZES}
    assert [n for n, _ in measured.score] == sorted(sizes)
    assert measured.rows[-1][0] == 4 and measured.rows[-1][1] >= 1
    assert e.target._texts == []


@pytest.mark.parametrize("room", [1, 2, 3, 8, 30])
def test_less_room_measures_less(room):
    measured = probe(engine(context=2 + room), request(room), SAMPLED).costs
    assert measured.step_seconds(0) > 0 and measured.step_seconds(3) > 0
    assert max(g for g, _ in measured.draft) < room


def test_steps_behind_a_longer_text():
    measured = probe(engine(), request(), SAMPLED).costs
    assert measured.far is not None and measured.is_valid
    assert measured.far.context == LONG_CONTEXT_TOKENS > measured.context > 2
    assert [g for g, _ in measured.far.draft] == list(LONG_CONTEXT_DRAFT_SIZES)
    assert [n for n, _ in measured.far.score] == [g + 1 for g in LONG_CONTEXT_DRAFT_SIZES]
    assert measured.far.draft_limit is None


def test_the_context_at_which_a_draft_takes_no_more_time():
    class Few(TableModel):
        max_attended_tokens = 2000

    drafter = LMDrafter(Few(random_model(2, V), V), V)
    far = probe(engine(drafter), request(), SAMPLED).costs.far
    assert far is not None and far.draft_limit == 2000


SHARED = (0, 3)


def rounds(*slowness: float) -> list[StepRecord]:
    """Rounds of two gammas, each round so many times slower than it should be."""
    return [
        StepRecord(g, (0,) * g, 0, (1,), (), g, 0.1 * g * slow, slow, 0.0, 1)
        for slow in slowness
        for g in SHARED
    ]


def spread(*slowness: float) -> float | None:
    steps = rounds(*slowness)
    return _compare_halves(steps, [step.drafted for step in steps], SHARED)


def test_how_far_two_halves_differ():
    assert spread(1.0, 1.1) == pytest.approx(1.1)
    assert spread(1.0, 1.5) == spread(1.5, 1.0) == pytest.approx(1.5)
    assert spread(9.0, 1.0, 1.1, 1.1, 1.0, 7.0) == pytest.approx(1.0)  # mostly quiet, each half
    assert spread(1.0) is None  # nothing to compare


@pytest.mark.parametrize(("stray", "expected"), [(0, 1.0), (3, 1.0), (4, 1.8)])
def test_a_few_gammas_may_disagree(stray: int, expected: float) -> None:
    """Such as those whose steps meet new blocks of the cache in every second round."""
    steps = [
        StepRecord(g, (0,) * g, 0, (1,), (), g, 0.0, 1.8 if odd and i < stray else 1.0, 0.0, 1)
        for odd in (False, True, False, True, False)
        for i, g in enumerate(SINGLE_DRAFT_SIZES)
    ]
    assert _compare_halves(
        steps, [step.drafted for step in steps], SINGLE_DRAFT_SIZES
    ) == pytest.approx(expected)
