"""Figures of a race: medians, throughput, and pictures."""

from __future__ import annotations

from dataclasses import replace

import pytest

from foretoken import theory
from foretoken.drafters.lm import LMDrafter
from foretoken.lab.bench import figures as bench
from foretoken.lab.bench.figures import (
    AUTOMATIC,
    PLAIN,
    Figures,
    RaceAgreement,
    Throughput,
    TimeShares,
    draw,
    draw_batches,
    occupancy,
    of_batch,
    padding,
    throughput,
)
from foretoken.lab.bench.race import Guest, Key, OwnContestant, RaceRun, RaceTask, Round
from foretoken.lab.estimate import Spread
from foretoken.models.table import TableModel
from foretoken.records import StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model


def run(seconds: float, *, tokens: int = 11, first: int = 1, first_seconds: float = 1.0) -> RaceRun:
    return RaceRun(list(range(tokens)), first, first_seconds, seconds)


def step(gamma: int, draft: float, score: float, verify: float = 0.0, accepted: int = 0):
    return StepRecord(
        gamma=gamma,
        guesses=(0,) * gamma,
        accepted=accepted,
        kept=(0,) * (accepted + 1),
        overlaps=(0.5,) * gamma,
        draft_calls=gamma,
        draft_seconds=draft,
        score_seconds=score,
        verify_seconds=verify,
        rows=1,
    )


def test_a_token_takes_what_came_behind_the_first_ones():
    assert bench.per_token([run(6.0)]) == pytest.approx(0.5)  # (6 - 1) / (11 - 1)
    assert bench.per_token([run(6.0), run(9.0, first=4)]) == pytest.approx((5 + 8) / (10 + 7))


def test_where_all_came_first_all_counts():
    assert bench.per_token([run(6.0, tokens=3, first=3)]) == pytest.approx(2.0)


def test_ratios_are_of_one_round():
    slow: Key = ("other", 0)
    rounds: list[Round] = [
        {PLAIN: [run(2.0)], slow: [run(3.0)]},  # 2x
        {PLAIN: [run(11.0)], slow: [run(31.0)]},  # 3x
        {PLAIN: [run(2.0)], slow: [run(11.0)]},  # 10x
    ]
    assert bench.faster(rounds, PLAIN, slow) == pytest.approx(3.0)
    assert bench.faster(rounds, slow, PLAIN) == pytest.approx(1 / 3)


def test_figures_of_a_stranger():
    key: Key = ("other", 2)
    rounds: list[Round] = [
        {PLAIN: [run(11.0)], key: [run(seconds, first_seconds=seconds - 1)]}
        for seconds in (2.0, 3.0, 6.0)
    ]
    summary = bench.figures(rounds, key, greedy=True)
    assert (summary.name, summary.gamma) == key
    assert summary.seconds_per_token.median == pytest.approx(0.1)
    assert summary.tokens_per_second == pytest.approx(10.0)
    assert summary.first_seconds.median == 2.0
    assert (summary.first_seconds.q1, summary.first_seconds.q3) == (1.5, 3.5)
    assert summary.speedup == pytest.approx(10.0)
    assert (summary.shares, summary.predicted, summary.tokens_per_call) == (None,) * 3
    assert summary.agreement == bench.RaceAgreement(1.0, None)


def test_shares():
    steps = (step(2, 1.0, 4.0, 0.5), step(2, 1.0, 2.0, 0.5))
    shares = bench.shares([RaceRun([0], 1, 0.0, 12.0, steps, loop_seconds=10.0)])
    assert (shares.draft, shares.target, shares.verify) == pytest.approx((0.2, 0.6, 0.1))
    assert shares.rest == pytest.approx(0.1)


def rounds_of(gamma: int, draft: float, score: float, plain: float) -> list[Round]:
    """Two rounds with the same steps, the second twice as slow."""
    return [
        {
            PLAIN: [RaceRun([0] * 9, 1, 0.0, 1.0, (step(0, 0.0, plain * slow),) * 8, 1.0)],
            ("foretoken", gamma): [
                RaceRun([0] * 9, 1, 0.0, 1.0, (step(gamma, draft * slow, score * slow),) * 4, 1.0)
            ],
        }
        for slow in (1, 2)
    ]


def test_what_is_predicted():
    prediction = bench.predict(rounds_of(2, draft=0.4, score=1.5, plain=1.0), ("foretoken", 2))
    assert prediction is not None
    assert (prediction.alpha, prediction.c, prediction.v) == pytest.approx((0.5, 0.2, 1.5))
    v = [0.0, 1.0, 1.25, 1.5]  # a line through what was measured
    assert prediction.speedup == pytest.approx(theory.walltime_factor(0.5, 2, 0.2, v=v))


def test_steps_without_a_draft_token_are_predicted_as_such() -> None:
    """Half of the steps: (1.75 + 1) tokens in (0.4 + 1.5) + 1 target passes."""
    rounds = rounds_of(2, draft=0.4, score=1.5, plain=1.0)
    for turns, slow in zip(rounds, (1, 2), strict=True):
        (made,) = turns["foretoken", 2]
        silent = (step(0, 0.0, slow),) * 4
        turns["foretoken", 2] = [replace(made, steps=made.steps + silent)]
    prediction = bench.predict(rounds, ("foretoken", 2))
    assert prediction is not None and prediction.speedup == pytest.approx(2.75 / 2.9)


def test_nothing_is_predicted_without_a_gamma_or_its_draft_tokens():
    rounds = rounds_of(2, 0.4, 1.5, 1.0)
    assert bench.predict(rounds, PLAIN) is None
    rounds = [round_ | {("foretoken", 3): round_["foretoken", 2]} for round_ in rounds]
    assert bench.predict(rounds, ("foretoken", 3)) is None


def test_measured_over_predicted():
    rounds = rounds_of(2, 0.4, 1.5, 1.0)
    summary = bench.figures(rounds, ("foretoken", 2), greedy=False)
    assert summary.predicted and summary.measured_over_predicted == pytest.approx(
        1.0 / summary.predicted.speedup
    )
    assert summary.tokens_per_call == 1.0 and summary.agreement is None


def test_agreement_says_how_far_and_where():
    other: Key = ("other", 0)
    text = [5, 6, 7, 8]
    rounds: list[Round] = [
        {PLAIN: [RaceRun(text, 1, 0.0, 1.0)] * 2, other: [RaceRun(t, 1, 0.0, 1.0) for t in both]}
        for both in ((text, [5, 6, 0, 8]), ([5, 6, 7, 1], text))
    ]
    assert bench.agreement(rounds, other) == bench.RaceAgreement((4 + 2 + 3 + 4) / 16, 2)
    assert bench.agreement(rounds, PLAIN) == bench.RaceAgreement(1.0, None)


def test_a_duel_is_of_each_ones_best():
    times: dict[Key, float] = {
        PLAIN: 9.0,
        ("foretoken", 4): 3.0,
        ("foretoken", 8): 5.0,
        AUTOMATIC: 2.0,
        ("peer", 0): 18.0,
        ("peer", 4): 8.0,
        ("peer", 8): 6.0,
    }
    rounds: list[Round] = [
        {key: [run(1 + time * slow)] for key, time in times.items()} for slow in (1, 2, 3)
    ]
    assert bench.best(rounds, "foretoken") == ("foretoken", 4)
    duel = bench.duel(rounds, "peer")
    assert (duel.gamma, duel.peer_gamma) == (4, 8)
    assert (duel.plain, duel.best, duel.automatic) == pytest.approx((2.0, 2.0, 3.0))


V = 6
TASK = RaceTask([1, 2], 12, SamplingParams(1.0), seed=3)


def pair() -> Speculator:
    return Speculator(
        TableModel(random_model(1, V), V), LMDrafter(TableModel(random_model(2, V), V), V)
    )


def batch_step(rows: int, drafted: int = 0, padded: int = 0) -> StepRecord:
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
    steps = [
        batch_step(2),
        batch_step(2),
        batch_step(2),
        batch_step(2),
        batch_step(1),
        batch_step(1),
    ]  # passes of 2, 2, 1 and 1 rows
    assert occupancy(steps, 2) == pytest.approx(6 / 4 / 2)


def test_what_is_computed_for_no_row():
    steps = [
        batch_step(2, 3, padded=2),
        batch_step(2, 1, padded=2),
        batch_step(1, 0, padded=1),
    ]
    assert padding(steps) == pytest.approx(3 / (3 + 4 + 2 + 1))


def test_figures_by_hand():
    """Of two texts of 10 tokens; a peer's come one after the other."""
    peer: Key = ("a peer", 2)

    def own(seconds: float) -> list[RaceRun]:
        steps = (batch_step(2), batch_step(2))
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


def figures(name: str, gamma: int | None, shares: TimeShares | None) -> Figures:
    time = Spread(0.1, 0.09, 0.12, 3)
    return Figures(name, gamma, time, time, 10.0, 1.0, None, shares, None, None)


def test_both_pictures(tmp_path):
    shares = TimeShares(0.2, 0.5, 0.1, 0.2)
    table = [figures("foretoken", gamma, shares) for gamma in (0, 4, None)]
    paths = draw([*table, figures("a peer", 4, None)], tmp_path, "the title")
    assert [path.name for path in paths] == ["time-per-token.svg", "shares.svg"]
    times, parts = (path.read_text() for path in paths)
    for label in ("the title", "a peer", "foretoken, automatic"):
        assert label in times
    for label in ("the title", "draft", "target", "verify", "rest", "gamma 4"):
        assert label in parts


def test_a_line_for_each_contestant(tmp_path):
    rate = Spread(10.0, 9.0, 11.0, 3)
    contestants = [("foretoken", 0), ("foretoken", None), ("a peer", 4)]
    table = {
        texts: [
            Throughput(*key, rate, 1.0, {}, None, None, None, None, None, None)
            for key in contestants
        ]
        for texts in (1, 8)
    }
    path = draw_batches(table, tmp_path, "the title")
    assert path.name == "throughput.svg"
    for title in ("the title", "a peer, gamma 4", "foretoken, automatic", "texts at once"):
        assert title in path.read_text()
