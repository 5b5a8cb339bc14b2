"""The benchmark: turns of a race, and the arithmetic of medians, ratios, shares and predictions."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from foretoken import theory
from foretoken.drafters.lm import LMDrafter
from foretoken.errors import InputError, NumericsError
from foretoken.lab.bench import figures as bench
from foretoken.lab.bench import peer, race
from foretoken.lab.bench.figures import AUTOMATIC, PLAIN
from foretoken.lab.bench.peer import Guest, Peer
from foretoken.lab.bench.race import Key, Own, Round, Run, Task, Unable
from foretoken.models.table import TableModel
from foretoken.request import StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model

V = 6
TASK = Task([1, 2], 12, SamplingParams(1.0), seed=3)


def run(seconds: float, *, tokens: int = 11, first: int = 1, first_seconds: float = 1.0) -> Run:
    return Run(list(range(tokens)), first, first_seconds, seconds)


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
    found = bench.figures(rounds, key, greedy=True)
    assert (found.name, found.gamma) == key
    assert found.seconds_per_token.median == pytest.approx(0.1)
    assert found.tokens_per_second == pytest.approx(10.0)
    assert found.first_seconds.median == 2.0
    assert (found.first_seconds.q1, found.first_seconds.q3) == (1.5, 3.5)
    assert found.speedup == pytest.approx(10.0)
    assert (found.shares, found.predicted, found.tokens_per_call) == (None,) * 3
    assert found.agreement == bench.Agreement(1.0, None)


def test_shares():
    steps = (step(2, 1.0, 4.0, 0.5), step(2, 1.0, 2.0, 0.5))
    found = bench.shares([Run([0], 1, 0.0, 12.0, steps, loop_seconds=10.0)])
    assert (found.draft, found.target, found.verify) == pytest.approx((0.2, 0.6, 0.1))
    assert found.rest == pytest.approx(0.1)


def rounds_of(gamma: int, draft: float, score: float, plain: float) -> list[Round]:
    """Two rounds with the same steps, the second twice as slow."""
    return [
        {
            PLAIN: [Run([0] * 9, 1, 0.0, 1.0, (step(0, 0.0, plain * slow),) * 8, 1.0)],
            ("foretoken", gamma): [
                Run([0] * 9, 1, 0.0, 1.0, (step(gamma, draft * slow, score * slow),) * 4, 1.0)
            ],
        }
        for slow in (1, 2)
    ]


def test_what_is_predicted():
    found = bench.predict(rounds_of(2, draft=0.4, score=1.5, plain=1.0), ("foretoken", 2))
    assert found is not None
    assert (found.alpha, found.c, found.v) == pytest.approx((0.5, 0.2, 1.5))
    v = [0.0, 1.0, 1.25, 1.5]  # a line through what was measured
    assert found.speedup == pytest.approx(theory.walltime_factor(0.5, 2, 0.2, v=v, tokens=8))


def test_nothing_is_predicted_without_a_gamma_or_its_guesses():
    rounds = rounds_of(2, 0.4, 1.5, 1.0)
    assert bench.predict(rounds, PLAIN) is None
    rounds = [found | {("foretoken", 3): found["foretoken", 2]} for found in rounds]
    assert bench.predict(rounds, ("foretoken", 3)) is None


def test_measured_over_predicted():
    rounds = rounds_of(2, 0.4, 1.5, 1.0)
    found = bench.figures(rounds, ("foretoken", 2), greedy=False)
    assert found.predicted and found.measured_over_predicted == pytest.approx(
        1.0 / found.predicted.speedup
    )
    assert found.tokens_per_call == 1.0 and found.agreement is None


def test_agreement_says_how_far_and_where():
    other: Key = ("other", 0)
    text = [5, 6, 7, 8]
    rounds: list[Round] = [
        {PLAIN: [Run(text, 1, 0.0, 1.0)] * 2, other: [Run(t, 1, 0.0, 1.0) for t in both]}
        for both in ((text, [5, 6, 0, 8]), ([5, 6, 7, 1], text))
    ]
    assert bench.agreement(rounds, other) == bench.Agreement((4 + 2 + 3 + 4) / 16, 2)
    assert bench.agreement(rounds, PLAIN) == bench.Agreement(1.0, None)


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
    found = bench.duel(rounds, "peer")
    assert (found.gamma, found.peer_gamma) == (4, 8)
    assert (found.plain, found.best, found.automatic) == pytest.approx((2.0, 2.0, 3.0))


def pair() -> Speculator:
    return Speculator(
        TableModel(random_model(1, V), V), LMDrafter(TableModel(random_model(2, V), V), V)
    )


def test_our_own_turn():
    spec = pair()
    found = Own(spec, 3).run(TASK)
    (done,) = spec.generate([1, 2], max_new_tokens=12, temperature=1.0, gamma=3, seed=3)
    assert found.tokens == done.tokens and found.first_tokens == len(done.steps[0].kept)
    assert 0 < found.first_seconds < found.seconds and found.loop_seconds < found.seconds
    spent = sum(s.draft_seconds + s.score_seconds + s.verify_seconds for s in found.steps)
    assert spent <= found.loop_seconds
    assert sum(len(s.kept) for s in found.steps) == 12


class Echo:
    """A contestant that writes down what it is asked."""

    def __init__(self, key: Key, heard: list[tuple[Key, int]]) -> None:
        self.key, self.heard = key, heard

    def run(self, task: Task) -> Run:
        self.heard.append((self.key, task.seed))
        return run(2.0)


def test_contestants_take_turns_and_the_first_round_warms_up(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(race, "REST_SECONDS", 0.0)
    heard: list[tuple[Key, int]] = []
    told: list[Key] = []
    a, b = Echo(PLAIN, heard), Echo(("b", 1), heard)
    tasks = [TASK, TASK]
    rounds = list(
        race.race([a, b], lambda i: [Task(t.prompt, 1, t.params, i) for t in tasks], 2, told.append)
    )
    order = [(key, i) for i in range(3) for key in (PLAIN, ("b", 1)) for _ in tasks]
    assert heard == order and told == [PLAIN, ("b", 1)] * 3
    assert len(rounds) == 2 and all(len(runs) == 2 for found in rounds for runs in found.values())


class Quitter(Echo):
    """Cannot go on from a number of turns on."""

    def __init__(self, key: Key, turns: int) -> None:
        super().__init__(key, [])
        self.turns = turns

    def run(self, task: Task) -> Run:
        if len(self.heard) == self.turns:
            raise Unable("it ended: killed")
        return super().run(task)


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
            left=lambda key, why: left.append((key, why)),
        )
    )
    assert left == [(("b", 1), "it ended: killed")]  # and is not asked again
    assert len(other.heard) == turns  # nor is the rest of its side
    assert len(rounds) == 3 and all(list(found) == [PLAIN] for found in rounds[turns:])


def test_our_own_failure_ends_the_race():
    class Broken(Echo):
        def run(self, task: Task) -> Run:
            raise NumericsError("target logits are NaN")

    with pytest.raises(NumericsError):
        next(race.race([Broken(PLAIN, [])], lambda i: [TASK], 1))


def test_an_interrupted_turn_ends_the_race(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    spec = pair()
    monkeypatch.setattr(spec.target, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        next(race.race([Own(spec, 0)], lambda i: [TASK], 1))


SCRIPT = """
import json, sys
for i, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if i == 0:
        print(json.dumps({"version": "1", "precision": {"weights": asked["draft_dtype"]}}))
    elif asked["gamma"] == 9:
        print(json.dumps({"error": "nine is too many"}))
    elif asked["gamma"] == 7:
        print(json.dumps({"tokens": [7]}))
    elif asked["gamma"] == 6:
        print("a library says hello")
    elif asked["gamma"] == 8:
        sys.exit("the last word")
    else:
        tokens = [asked["gamma"]] * asked["max_new_tokens"]
        print(json.dumps(
            {"tokens": tokens, "first_tokens": 1, "first_seconds": 0.1, "seconds": 0.5}
        ))
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
    assert stranger.about == {"version": "1", "precision": {"weights": "bfloat16"}}
    guest = Guest(stranger, 4)
    assert guest.key == ("stranger", 4)
    assert guest.run(TASK) == Run([4] * 12, 1, 0.1, 0.5)


def test_a_peer_that_refuses(stranger: Peer):
    with pytest.raises(Unable, match=r"^nine is too many$"):
        stranger.run(TASK, 9)
    assert stranger.run(TASK, 1).tokens == [1] * 12  # it is still there


def test_a_peer_that_stops_early(stranger: Peer):
    with pytest.raises(Unable, match="made 1 tokens, not 12"):
        stranger.run(TASK, 7)


def test_a_peer_that_says_something_else(stranger: Peer):
    with pytest.raises(Unable, match="its answer is no JSON: a library says hello"):
        stranger.run(TASK, 6)


def test_a_peer_that_dies(stranger: Peer):
    for _ in range(2):
        with pytest.raises(Unable, match=r"^it ended: the last word$"):
            stranger.run(TASK, 8)


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
