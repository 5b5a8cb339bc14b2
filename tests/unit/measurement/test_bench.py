"""Contestants in turn, their figures and predictions, and one prompt beside plain decoding."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest

from foretoken import theory
from foretoken.costing.costs import Costs
from foretoken.drafters.base import Draft, Draw
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError
from foretoken.measurement import races
from foretoken.measurement.races import (
    AUTOMATIC_GAMMA,
    PLAIN_DECODING,
    ContestantKey,
    Race,
    RaceRun,
    RaceTask,
    RoundRuns,
    RunTurn,
    compare_with_plain,
    make_own_turns,
    predict,
    prepare_tasks,
    repeat_tasks,
    run_own_turn,
    run_rounds,
)
from foretoken.records import StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel

V = 6
TASK = RaceTask([1, 2], 12, SamplingParams(1.0), seed=3)


P, Q = random_model(1, V), random_model(2, V)


def pair() -> Speculator:
    return Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V))


def run(seconds: float, *, tokens: int = 11, first: int = 1, first_seconds: float = 1.0) -> RaceRun:
    return RaceRun(list(range(tokens)), first, first_seconds, seconds)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "REST_SECONDS", 0.0)


def test_our_own_turn_is_one_call():
    tasks, spec = repeat_tasks([TASK, replace(TASK, prompt=[4])], 3), pair()
    runs = run_own_turn(spec, tasks, 3)
    for task, each in zip(tasks, runs, strict=True):
        how = {"max_new_tokens": 12, "temperature": 1.0, "gamma": 3}
        (alone,) = spec.generate([task.prompt], seed=[task.seed], **how)
        assert each.tokens == alone.tokens
        assert each.steps[0].rows == 3 and each.seconds == runs[0].seconds
        first = len(alone.steps[0].new_tokens)
        assert each.first_tokens == first and 0 < each.first_seconds < each.seconds
        assert sum(len(s.new_tokens) for s in each.steps) == 12 - first


def test_tasks_come_again_with_seeds_of_their_own():
    other = replace(TASK, prompt=[4], seed=4)
    tasks = repeat_tasks([TASK, other], 3)
    assert [(task.prompt, task.seed) for task in tasks] == [([1, 2], 3), ([4], 4), ([1, 2], 5)]
    assert repeat_tasks([TASK, other], 1) == [TASK]
    two = [replace(task, category=name) for task, name in ((TASK, "qa"), (other, "rag"))]
    made = [(task.category, task.prompt, task.seed) for task in repeat_tasks([*two, two[0]], 2)]
    assert made == [("qa", [1, 2], 3), ("qa", [1, 2], 4), ("rag", [4], 5), ("rag", [4], 6)]


def test_a_pair_is_prepared_so_that_no_text_ends_early():
    spec, params = pair(), SamplingParams(max_new_tokens=5)
    ready, tasks = prepare_tasks(spec, [[1, 2], [3]], params, 7)
    assert not ready.ends.eos and ready.target is spec.target
    made = [(task.prompt, task.tokens, task.seed) for task in tasks]
    assert made == [([1, 2], 5, 7), ([3], 5, 8)]
    _, tasks = prepare_tasks(spec, [[1, 2], [3]], params, 7, ["qa", "rag"])
    assert [task.category for task in tasks] == ["qa", "rag"]
    small = replace(spec, target=TableModel(P, V))
    small.target.context = 6
    with pytest.raises(InputError, match="prompt 0 leaves room for 4 new tokens, not 5"):
        prepare_tasks(small, [[1, 2]], params, 0)


def test_plain_and_automatic_are_always_there():
    assert list(make_own_turns(pair(), [2], "block")) == [
        PLAIN_DECODING,
        ("foretoken", 2),
        AUTOMATIC_GAMMA,
    ]
    alone = Speculator(TableModel(P, V), NoDrafter())
    assert list(make_own_turns(alone, [2], "block")) == [PLAIN_DECODING]


Asked = list[tuple[ContestantKey, list[int]]]


def echo(key: ContestantKey, asked: Asked) -> tuple[ContestantKey, RunTurn]:
    """A contestant that records its seeds."""

    def turn(tasks: list[RaceTask]) -> list[RaceRun]:
        asked.append((key, [task.seed for task in tasks]))
        return [run(2.0) for _ in tasks]

    return key, turn


@pytest.mark.parametrize("together", [False, True])
def test_contestants_take_turns_and_the_first_round_warms_up(together: bool):
    asked: Asked = []
    told: list[ContestantKey] = []
    both = dict([echo(PLAIN_DECODING, asked), echo(("b", 1), asked)])
    result = run_rounds(both, repeat_tasks([TASK], 2), 2, together=together, report=told.append)
    seeds = [[3, 4], [5, 6], [7, 8]]
    assert asked == [
        (key, part)
        for now in seeds
        for key in both
        for part in ([now] if together else [[seed] for seed in now])
    ]
    assert told == [PLAIN_DECODING, ("b", 1)] * 3
    assert len(result.rounds) == 2 and result.together == together
    assert all(len(runs) == 2 for turns in result.rounds for runs in turns.values())


def test_a_batch_has_the_tasks_of_one_category():
    asked: Asked = []
    tasks = [replace(TASK, seed=i, category=name) for i, name in enumerate(("qa", "rag", "qa"))]
    plain = dict([echo(PLAIN_DECODING, asked)])
    together = run_rounds(plain, tasks, 1, together=True)
    assert asked[:2] == [(PLAIN_DECODING, [0, 2]), (PLAIN_DECODING, [1])]
    assert together.categories == ("qa", "qa", "rag")
    assert run_rounds(plain, tasks, 1).categories == ("qa", "rag", "qa")
    assert run_rounds(plain, [TASK], 1).categories == ()


def test_an_interrupted_turn_ends_the_race(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    spec = pair()
    turn = partial(run_own_turn, spec, gamma=0)
    monkeypatch.setattr(spec.target, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        turn([TASK, TASK])
    assert run_rounds({PLAIN_DECODING: turn}, [TASK], 1).rounds == []


def step(gamma: int, draft: float, score: float, verify: float = 0.0, accepted: int = 0):
    return StepRecord(
        gamma=gamma,
        draft_tokens=(0,) * gamma,
        accepted=accepted,
        new_tokens=(0,) * (accepted + 1),
        overlaps=(0.5,) * gamma,
        draft_calls=gamma,
        draft_seconds=draft,
        score_seconds=score,
        verify_seconds=verify,
        rows=1,
    )


def per_token(runs: list[RaceRun], *, together: bool = False) -> float:
    (seconds,) = Race([{PLAIN_DECODING: runs}], together).compute_seconds_per_token(PLAIN_DECODING)
    return seconds


def test_a_token_takes_what_came_behind_the_first_ones():
    assert per_token([run(6.0)]) == pytest.approx(0.5)  # (6 - 1) / (11 - 1)
    assert per_token([run(6.0), run(9.0, first=4)]) == pytest.approx((5 + 8) / (10 + 7))
    assert per_token([run(6.0, tokens=3, first=3)]) == pytest.approx(2.0)  # all of them


def test_figures_of_a_contestant():
    key: ContestantKey = ("other", 2)
    rounds: list[RoundRuns] = [
        {PLAIN_DECODING: [run(11.0 * slow)], key: [run(seconds, first_seconds=seconds - 1)]}
        for seconds, slow in ((2.0, 1), (3.0, 2), (6.0, 4))
    ]
    summary = Race(rounds).compute_figures(key)
    assert summary.gamma == 2 and summary.seconds_per_token.median == pytest.approx(0.1)
    assert summary.tokens_per_second.median == pytest.approx(10.0)
    assert summary.first_seconds.median == 2.0
    assert (summary.first_seconds.q1, summary.first_seconds.q3) == (1.5, 3.5)
    ratios = [10.0, 21.0, 43.0]  # of one round each
    assert Race(rounds).compute_speedups(key, PLAIN_DECODING) == pytest.approx(ratios)
    assert (summary.speedup.median, summary.speedup.q1) == pytest.approx((21.0, 15.5))
    assert (summary.predicted, summary.tokens_per_call) == (None, None)


def test_texts_at_once_take_until_the_last_is_there():
    runs = [RaceRun([0] * 10, 1, 0.0, seconds, (step(0, 0.0, 1.0),)) for seconds in (2.0, 4.0)]
    figures = Race([{PLAIN_DECODING: runs}], together=True).compute_figures(PLAIN_DECODING)
    assert figures.tokens_per_second.median == pytest.approx(5.0) and figures.predicted is None
    assert figures.speedup.median == 1.0 and figures.tokens_per_call == 1.0


def test_figures_by_category():
    """Speed-ups are those of one category's tasks in the same round."""
    key: ContestantKey = ("foretoken", 2)
    steps = (step(2, 0.1, 1.0, accepted=1), step(2, 0.1, 1.0, accepted=2))
    fast = [replace(run(seconds), steps=steps[:n]) for seconds, n in ((2.0, 1), (6.0, 2), (3.0, 2))]
    plain = [run(11.0), run(11.0), run(21.0)]
    turns: RoundRuns = {PLAIN_DECODING: plain, key: fast}
    race = Race([turns, turns], categories=("qa", "rag", "qa"))
    figures = race.compute_category_figures(key)
    assert list(figures) == ["qa", "rag"]
    qa, rag = figures.values()
    assert (qa.sequences, rag.sequences) == (2, 1)
    assert qa.tokens_per_second.median == pytest.approx(20 / 3) and qa.speedup.n == 2
    assert (qa.speedup.median, rag.speedup.median) == pytest.approx((30 / 3, 10 / 5))
    assert (qa.tokens_per_call, rag.tokens_per_call) == pytest.approx((7 / 3, 5 / 2))
    assert qa.alpha == 0.5
    undrafted = race.compute_category_figures(PLAIN_DECODING)["qa"]
    assert undrafted.speedup.median == 1.0 and undrafted.alpha is None
    assert Race([turns]).compute_category_figures(key) == {}


def test_batches_of_categories_take_turns():
    runs = [RaceRun([0] * 10, 1, 0.0, seconds) for seconds in (2.0, 4.0, 1.0)]
    race = Race([{PLAIN_DECODING: runs}], together=True, categories=("qa", "qa", "rag"))
    assert race.compute_figures(PLAIN_DECODING).tokens_per_second.median == pytest.approx(30 / 5)
    figures = race.compute_category_figures(PLAIN_DECODING)
    rates = {name: each.tokens_per_second.median for name, each in figures.items()}
    assert rates == pytest.approx({"qa": 20 / 4, "rag": 10 / 1})


def test_what_is_predicted():
    """Also where half of the runs were twice as slow."""
    plain = [step(0, 0.0, slow) for slow in (1.0, 2.0)] * 8
    made = [step(2, 0.4 * slow, 1.5 * slow) for slow in (1.0, 2.0)] * 4
    prediction = predict(plain, made)
    assert prediction is not None
    assert (prediction.alpha, prediction.c, prediction.v) == pytest.approx((0.5, 0.2, 1.5))
    v = [0.0, 1.0, 1.25, 1.5]  # a line through what was measured
    assert prediction.predicted == pytest.approx(theory.walltime_factor(0.5, 2, 0.2, v=v))


def test_steps_without_a_draft_token_are_predicted_as_such() -> None:
    """Half of the steps: (1.75 + 1) tokens in (0.4 + 1.5) + 1 target passes."""
    prediction = predict([step(0, 0.0, 1.0)] * 8, [step(2, 0.4, 1.5), step(0, 0.0, 1.0)] * 4)
    assert prediction is not None and prediction.predicted == pytest.approx(2.75 / 2.9)


def test_of_few_draft_tokens_nothing_is_predicted():
    plain = [step(0, 0.0, 1.0)] * 8
    assert predict(plain, plain) is None and predict(plain, [step(2, 0.4, 1.5)] * 3) is None


P, Q = random_model(1, V), random_model(2, V)


def test_a_comparison():
    options = {"gamma": 3, "temperature": 1.0, "max_new_tokens": 30}
    (completion,) = pair().generate([1, 2], **options)
    comparison = compare_with_plain(pair(), [1, 2], **options)
    assert comparison.alpha == pytest.approx(completion.stats.alpha)
    assert comparison.gamma == 3 >= comparison.mean_gamma > 2 and comparison.silent < 0.1
    assert 0 < comparison.alpha < 1 and comparison.c > 0 and comparison.v > 0
    assert comparison.predicted > 0
    assert comparison.speedup == comparison.plain_seconds_per_token / comparison.seconds_per_token


def test_without_draft_tokens_nothing_is_predicted():
    spec = Speculator(TableModel(P, V), NoDrafter())
    comparison = compare_with_plain(spec, [1, 2], max_new_tokens=5)
    assert comparison.gamma is None and comparison.mean_gamma == 0 and comparison.speedup > 0
    assert (
        comparison.alpha,
        comparison.c,
        comparison.v,
        comparison.paper,
        comparison.predicted,
    ) == (None,) * 5
    assert comparison.silent == 1
    comparison = compare_with_plain(pair(), [1, 2], gamma=3, max_new_tokens=1)
    assert comparison.mean_gamma == 0 and comparison.alpha is None and comparison.speedup > 0


class Seldom(LMDrafter):
    """Guesses at every third step only, as look-up does where a text seldom repeats itself."""

    calls = 0

    def propose(self, gamma: list[int], draw: Draw) -> Draft:
        self.calls += 1
        return super().propose(gamma if self.calls % 3 == 0 else [0] * len(gamma), draw)


@pytest.mark.parametrize("gamma", [3, None])
def test_what_is_predicted_follows_from_the_draft_tokens_made(
    gamma: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where draft tokens cost nothing, a pass always the same and every draft token is kept, the
    prediction is the tokens of a step, however many steps had a draft token."""
    free = Costs(((0, 0.0), (16, 0.0)), ((1, 1.0), (17, 1.0)), ((1, 0.0),))
    monkeypatch.setattr(races, "costs_from_steps", lambda steps: free)
    spec = Speculator(TableModel(P, V), Seldom(TableModel(P, V), V))
    spec.costing.measured["sampled", 1] = free
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 60}
    comparison = compare_with_plain(spec, [1, 2], 1, gamma=gamma, **options)
    (completion,) = spec.generate([1, 2], gamma=gamma, **options)
    assert comparison.alpha == pytest.approx(1.0) and 0.6 < comparison.silent < 0.8
    tokens_per_step = 1 + comparison.mean_gamma
    assert comparison.predicted == pytest.approx(tokens_per_step)
    assert comparison.paper == pytest.approx(tokens_per_step)
    assert completion.stats.tokens_per_call == pytest.approx(tokens_per_step, rel=0.2)
