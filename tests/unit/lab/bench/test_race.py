"""Contestants in turn, peers in processes of their own, and one prompt beside plain decoding."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken.costing.costs import Costs
from foretoken.drafters.base import Draft, Draw
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, NumericsError
from foretoken.lab.bench import race
from foretoken.lab.bench import race as peer
from foretoken.lab.bench.figures import PLAIN
from foretoken.lab.bench.race import (
    Guest,
    Key,
    OneByOne,
    OwnContestant,
    Peer,
    RaceRun,
    RaceTask,
    Unable,
    compare,
)
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


OTHER = replace(TASK, prompt=[8], seed=4)
SCRIPT = """
import json, sys
for i, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if i == 0:
        precision = {"weights": asked["draft_dtype"]}
        print(json.dumps({"version": "1", "precision": precision, "note": asked["batched"]}))
    elif asked["gamma"] == 9:
        print(json.dumps({"error": "nine is too many"}))
    elif asked["gamma"] == 7:
        print(json.dumps({"texts": [{"tokens": [7]}]}))
    elif asked["gamma"] == 6:
        print("a library says hello")
    elif asked["gamma"] == 8:
        sys.exit("the last word")
    else:
        texts = [
            {
                "tokens": [prompt[0]] * asked["max_new_tokens"],
                "first_tokens": len(asked["prompts"]),
                "first_seconds": 0.1,
                "seconds": 0.5 + seed,
            }
            for prompt, seed in zip(asked["prompts"], asked["seeds"], strict=True)
        ]
        print(json.dumps({"texts": texts}))
    sys.stdout.flush()
"""


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "stranger.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(peer, "command", lambda name: [sys.executable, str(script)])
    with Peer("stranger", "target", None, "bfloat16", None) as found:
        yield found


def test_a_peer_is_asked_in_json_lines(stranger: Peer):
    about = {"version": "1", "precision": {"weights": "bfloat16"}, "note": False}
    assert stranger.about == about
    guest = OneByOne(Guest(stranger, 4))
    assert guest.key == ("stranger", 4)
    assert guest.turn([TASK, OTHER]) == [
        RaceRun([1] * 12, 1, 0.1, 3.5),
        RaceRun([8] * 12, 1, 0.1, 4.5),
    ]


def test_several_tasks_at_once(stranger: Peer):
    runs = stranger.run([TASK, OTHER], 4)
    assert runs == [RaceRun([1] * 12, 2, 0.1, 3.5), RaceRun([8] * 12, 2, 0.1, 4.5)]


def test_a_peer_that_refuses(stranger: Peer):
    with pytest.raises(Unable, match=r"^nine is too many$"):
        stranger.run([TASK], 9)
    assert stranger.run([TASK], 1)[0].tokens == [1] * 12  # it is still there


def test_a_peer_that_stops_early(stranger: Peer):
    with pytest.raises(Unable, match="made 1 tokens, not 12"):
        stranger.run([TASK], 7)


def test_a_peer_that_says_something_else(stranger: Peer):
    with pytest.raises(Unable, match="its answer is no JSON: a library says hello"):
        stranger.run([TASK], 6)


def test_a_peer_that_dies(stranger: Peer):
    for _ in range(2):
        with pytest.raises(Unable, match=r"^it ended: the last word$"):
            stranger.run([TASK], 8)


def test_what_is_no_peer():
    with pytest.raises(InputError, match="'vllm'; give one of transformers, openvino-genai, llama"):
        peer.command("vllm")


def test_a_peer_without_its_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripts = tmp_path / "benchmarks" / "peers"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(peer, "REPOSITORY", tmp_path)
    with pytest.raises(InputError, match="needs a checkout of the repository"):
        peer.command("llama.cpp")
    for name in peer.SCRIPTS.values():
        (scripts / name).touch()
    with pytest.raises(InputError, match=r"python benchmarks/peers/make\.py llama\.cpp$"):
        peer.command("llama.cpp")
    (tmp_path / ".peers" / "llama.cpp").mkdir(parents=True)
    (tmp_path / ".peers" / "llama.cpp" / "ready").touch()
    python, script = peer.command("llama.cpp")
    assert python.startswith(str(tmp_path)) and script.endswith("peer_llama_cpp.py")
    assert peer.command("transformers")[0] == sys.executable


P, Q = random_model(1, V), random_model(2, V)


def pair_compare() -> Speculator:
    return Speculator(TableModel(P, V), LMDrafter(TableModel(Q, V), V))


def test_a_comparison():
    comparison = compare(pair_compare(), [1, 2], gamma=3, temperature=1.0, max_new_tokens=30)
    assert comparison.gamma == 3 >= comparison.mean_gamma > 2 and comparison.silent < 0.1
    assert 0 < comparison.alpha < 1 and comparison.c > 0 and comparison.v > 0
    assert comparison.predicted > 0
    assert comparison.speedup == comparison.plain_seconds_per_token / comparison.seconds_per_token


def test_alpha_is_that_of_the_runs():
    options = {"gamma": 3, "temperature": 1.0, "max_new_tokens": 30}
    (completion,) = pair_compare().generate([1, 2], **options)
    assert compare(pair_compare(), [1, 2], **options).alpha == pytest.approx(completion.stats.alpha)


def test_without_draft_tokens_nothing_is_predicted():
    spec = Speculator(TableModel(P, V), NoDrafter())
    comparison = compare(spec, [1, 2], max_new_tokens=5)
    assert comparison.gamma is None and comparison.mean_gamma == 0 and comparison.speedup > 0
    assert (
        comparison.alpha,
        comparison.c,
        comparison.v,
        comparison.paper,
        comparison.predicted,
    ) == (None,) * 5
    assert comparison.silent == 1


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
    monkeypatch.setattr("foretoken.lab.bench.race.of", lambda steps: free)
    spec = Speculator(TableModel(P, V), Seldom(TableModel(P, V), V))
    spec.costing.measured["sampled", 1] = free
    options: dict[str, Any] = {"temperature": 1.0, "max_new_tokens": 60}
    comparison = compare(spec, [1, 2], 1, gamma=gamma, **options)
    (completion,) = spec.generate([1, 2], gamma=gamma, **options)
    assert comparison.alpha == pytest.approx(1.0) and 0.6 < comparison.silent < 0.8
    tokens_per_step = 1 + comparison.mean_gamma
    assert comparison.predicted == pytest.approx(tokens_per_step)
    assert comparison.paper == pytest.approx(tokens_per_step)
    assert completion.stats.tokens_per_call == pytest.approx(tokens_per_step, rel=0.2)


def test_one_token():
    comparison = compare(pair_compare(), [1, 2], gamma=3, max_new_tokens=1)
    assert comparison.mean_gamma == 0 and comparison.alpha is None and comparison.speedup > 0


@pytest.mark.parametrize("after", [2, 8, 14])
def test_an_interruption_is_none_of_its_results(after):
    class Impatient(TableModel):
        left = after

        def score(self, blocks, need):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
            return super().score(blocks, need)

    spec = Speculator(Impatient(P, V), LMDrafter(TableModel(Q, V), V))
    with pytest.raises(KeyboardInterrupt):
        compare(spec, [1, 2], gamma=2, max_new_tokens=6)
