"""Turns of a race: their order, this package's own, and contestants that fail."""

from __future__ import annotations

import pytest

from foretoken.drafters.lm import LMDrafter
from foretoken.errors import NumericsError
from foretoken.lab.bench import race
from foretoken.lab.bench.figures import PLAIN
from foretoken.lab.bench.race import Key, OwnContestant, RaceRun, RaceTask, Unable
from foretoken.models.table import TableModel
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model

V = 6
TASK = RaceTask([1, 2], 12, SamplingParams(1.0), seed=3)


def run(seconds: float) -> RaceRun:
    return RaceRun(list(range(11)), 1, 1.0, seconds)


def pair() -> Speculator:
    return Speculator(
        TableModel(random_model(1, V), V), LMDrafter(TableModel(random_model(2, V), V), V)
    )


def test_our_own_turn():
    spec = pair()
    (result,) = OwnContestant(spec, 3).turn([TASK])
    (completion,) = spec.generate([1, 2], max_new_tokens=12, temperature=1.0, gamma=3, seed=3)
    assert result.tokens == completion.tokens and result.first_tokens == len(
        completion.steps[0].kept
    )
    assert 0 < result.first_seconds < result.seconds and result.loop_seconds < result.seconds
    spent = sum(s.draft_seconds + s.score_seconds + s.verify_seconds for s in result.steps)
    assert spent <= result.loop_seconds
    assert sum(len(s.kept) for s in result.steps) == 12 - result.first_tokens


class Echo:
    """A contestant that records its tasks."""

    def __init__(self, key: Key, asked: list[tuple[Key, int]]) -> None:
        self.key, self.asked = key, asked

    def turn(self, tasks: list[RaceTask]) -> list[RaceRun]:
        self.asked += [(self.key, task.seed) for task in tasks]
        return [run(2.0) for _ in tasks]


def test_contestants_take_turns_and_the_first_round_warms_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    asked: list[tuple[Key, int]] = []
    turns_done: list[Key] = []
    a, b = Echo(PLAIN, asked), Echo(("b", 1), asked)
    tasks = [TASK, TASK]
    rounds = list(
        race.race(
            [a, b],
            lambda i: [RaceTask(t.prompt, 1, t.params, i) for t in tasks],
            2,
            turns_done.append,
        )
    )
    order = [(key, i) for i in range(3) for key in (PLAIN, ("b", 1)) for _ in tasks]
    assert asked == order and turns_done == [PLAIN, ("b", 1)] * 3
    assert len(rounds) == 2 and all(len(runs) == 2 for round_ in rounds for runs in round_.values())


class Quitter(Echo):
    """Cannot go on from a number of turns on."""

    def __init__(self, key: Key, turns: int) -> None:
        super().__init__(key, [])
        self.turns = turns

    def turn(self, tasks: list[RaceTask]) -> list[RaceRun]:
        if len(self.asked) == self.turns:
            raise Unable("it ended: killed")
        return super().turn(tasks)


@pytest.mark.parametrize("turns", [0, 1])
def test_the_others_go_on_without_one_who_cannot(monkeypatch: pytest.MonkeyPatch, turns: int):
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    left: list[tuple[Key, str]] = []
    other, quitter = Echo(("b", 2), []), Quitter(("b", 1), turns)
    rounds = list(
        race.race(
            [Echo(PLAIN, []), quitter, other],
            lambda i: [TASK],
            3,
            on_exit=lambda key, why: left.append((key, why)),
        )
    )
    assert left == [(("b", 1), "it ended: killed")]  # and is not asked again
    assert len(other.asked) == turns  # nor is the rest of its side
    assert len(rounds) == 3 and all(list(round_) == [PLAIN] for round_ in rounds[turns:])


def test_our_own_failure_ends_the_race():
    class Broken(Echo):
        def turn(self, tasks: list[RaceTask]) -> list[RaceRun]:
            raise NumericsError("target logits are NaN")

    with pytest.raises(NumericsError):
        next(race.race([Broken(PLAIN, [])], lambda i: [TASK], 1))


def test_an_interrupted_turn_ends_the_race(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    spec = pair()
    monkeypatch.setattr(spec.target, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(race.race([OwnContestant(spec, 0)], lambda i: [TASK], 1))
