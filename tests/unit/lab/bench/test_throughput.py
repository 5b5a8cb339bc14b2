"""Several texts at once: our own turn, what a guest is asked, and the figures by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.lab.bench.figures import (
    PLAIN,
    RaceAgreement,
    occupancy,
    of_batch,
    padding,
    throughput,
)
from foretoken.lab.bench.race import Guest, Key, OwnContestant, RaceRun, RaceTask, Round
from foretoken.models.table import TableModel
from foretoken.records import StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model

V = 6
TASK = RaceTask([1, 2], 12, SamplingParams(1.0), seed=3)


def pair() -> Speculator:
    return Speculator(
        TableModel(random_model(1, V), V), LMDrafter(TableModel(random_model(2, V), V), V)
    )


def step(rows: int, drafted: int = 0, padded: int = 0) -> StepRecord:
    return StepRecord(
        gamma=drafted,
        guesses=(0,) * drafted,
        accepted=0,
        kept=(0,),
        overlaps=(),
        draft_calls=0,
        draft_seconds=0.0,
        score_seconds=0.0,
        verify_seconds=0.0,
        rows=rows,
        padding=padded,
    )


def test_tasks_come_again_with_seeds_of_their_own():
    other = replace(TASK, prompt=[4], seed=4)
    summary = of_batch([TASK, other], 3)
    assert [(task.prompt, task.seed) for task in summary] == [([1, 2], 3), ([4], 4), ([1, 2], 5)]
    assert of_batch([TASK, other], 1) == [TASK]


def test_our_own_turn_is_one_call():
    tasks, spec = of_batch([TASK, replace(TASK, prompt=[4])], 3), pair()
    runs = OwnContestant(spec, 3).turn(tasks)
    for task, run in zip(tasks, runs, strict=True):
        how = {"max_new_tokens": 12, "temperature": 1.0, "gamma": 3}
        (alone,) = spec.generate([task.prompt], seed=[task.seed], **how)
        assert run.tokens == alone.tokens
        assert run.steps[0].rows == 3 and run.loop_seconds < run.seconds == runs[0].seconds


def test_an_interruption_is_none_of_its_results(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    spec = pair()
    monkeypatch.setattr(spec.target, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        OwnContestant(spec, 0).turn([TASK, TASK])


def test_a_guest_is_given_all_at_once():
    class Asked:
        name = "a peer"

        def run(self, tasks: list[RaceTask], gamma: int) -> list[RaceRun]:
            assert (len(tasks), gamma) == (3, 4)
            return [RaceRun([0] * 12, 0, 0.0, 1.0)] * 3

    guest = Guest(Asked(), 4)  # pyright: ignore[reportArgumentType]
    assert guest.key == ("a peer", 4) and len(guest.turn([TASK] * 3)) == 3


def test_rows_that_end_early_leave_their_places_empty():
    steps = [step(2), step(2), step(2), step(2), step(1), step(1)]  # passes of 2, 2, 1 and 1 rows
    assert occupancy(steps, 2) == pytest.approx(6 / 4 / 2)


def test_what_is_computed_for_no_row():
    steps = [step(2, 3, padded=2), step(2, 1, padded=2), step(1, 0, padded=1)]
    assert padding(steps) == pytest.approx(3 / (3 + 4 + 2 + 1))


def test_figures_by_hand():
    """Of two texts of 10 tokens; a peer's come one after the other."""
    peer: Key = ("a peer", 2)

    def own(seconds: float) -> list[RaceRun]:
        steps = (step(2), step(2))
        return [RaceRun([0] * 10, 1, 0.0, seconds, steps, loop_seconds=0.75 * seconds)] * 2

    def others(seconds: float) -> list[RaceRun]:
        return [RaceRun([0] * 9 + [i], 0, 0.0, seconds / (2 - i)) for i in range(2)]

    rounds: list[Round] = [
        {PLAIN: own(seconds), peer: others(slower * seconds)}
        for seconds, slower in ((2.0, 2), (4.0, 3), (8.0, 10))
    ]
    mine, theirs = (throughput(rounds, key, greedy=True) for key in (PLAIN, peer))
    rates = mine.tokens_per_second
    assert (rates.q1, rates.median, rates.q3, rates.n) == pytest.approx((3.75, 5.0, 7.5, 3))
    assert mine.speedup == 1.0 and mine.ahead == {} and mine.tokens_per_call == 1.0
    assert (mine.occupancy, mine.padding) == (1.0, 0.0)
    assert mine.reading == pytest.approx(0.25)
    assert theirs.ahead == {"plain": pytest.approx(3.0)}  # the median of the rounds' ratios
    assert theirs.speedup == pytest.approx(1 / 3)
    assert theirs.tokens_per_second.median == pytest.approx(20 / 12)
    assert theirs.agreement == RaceAgreement(19 / 20, 9)
    nothing = theirs.tokens_per_call, theirs.occupancy, theirs.padding, theirs.reading
    assert nothing == (None,) * 4 and theirs.shares is None
