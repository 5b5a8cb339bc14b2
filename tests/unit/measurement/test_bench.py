"""Contestants in turn, their figures, peers in processes of their own, and one prompt beside plain
decoding."""

from __future__ import annotations

import sys
from dataclasses import replace
from functools import partial
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

from foretoken import theory
from foretoken.costing.costs import Costs
from foretoken.drafters.base import Draft, Draw
from foretoken.drafters.lm import LMDrafter
from foretoken.drafters.none import NoDrafter
from foretoken.errors import InputError, NumericsError
from foretoken.lab import bench
from foretoken.measurement.bench import (
    AUTOMATIC,
    PLAIN,
    Key,
    Peer,
    Race,
    RaceAgreement,
    RaceRun,
    RaceTask,
    Round,
    Turn,
    Unable,
    compare,
    occupancy,
    of_batch,
    own,
    padding,
    predict,
)
from foretoken.records import StepRecord
from foretoken.sampling.distributions import SamplingParams
from foretoken.speculator import Speculator
from oracle import random_model
from table import TableModel

V = 6
TASK = RaceTask([1, 2], 12, SamplingParams(1.0), seed=3)


def run(seconds: float, *, tokens: int = 11, first: int = 1, first_seconds: float = 1.0) -> RaceRun:
    return RaceRun(list(range(tokens)), first, first_seconds, seconds)


def pair() -> Speculator:
    return Speculator(
        TableModel(random_model(1, V), V), LMDrafter(TableModel(random_model(2, V), V), V)
    )


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "REST_SECONDS", 0.0)


def test_our_own_turn():
    spec = pair()
    (result,) = own(spec, [TASK], 3)
    (completion,) = spec.generate([1, 2], max_new_tokens=12, temperature=1.0, gamma=3, seed=3)
    first = len(completion.steps[0].kept)
    assert result.tokens == completion.tokens and result.first_tokens == first
    assert 0 < result.first_seconds < result.seconds
    spent = sum(s.draft_seconds + s.score_seconds + s.verify_seconds for s in result.steps)
    assert spent <= result.seconds - result.first_seconds
    assert sum(len(s.kept) for s in result.steps) == 12 - first


def test_our_own_turn_is_one_call():
    tasks, spec = of_batch([TASK, replace(TASK, prompt=[4])], 3), pair()
    runs = own(spec, tasks, 3)
    for task, each in zip(tasks, runs, strict=True):
        how = {"max_new_tokens": 12, "temperature": 1.0, "gamma": 3}
        (alone,) = spec.generate([task.prompt], seed=[task.seed], **how)
        assert each.tokens == alone.tokens
        assert each.steps[0].rows == 3 and each.seconds == runs[0].seconds


def test_tasks_come_again_with_seeds_of_their_own():
    other = replace(TASK, prompt=[4], seed=4)
    tasks = of_batch([TASK, other], 3)
    assert [(task.prompt, task.seed) for task in tasks] == [([1, 2], 3), ([4], 4), ([1, 2], 5)]
    assert of_batch([TASK, other], 1) == [TASK]


Asked = list[tuple[Key, list[int]]]


def echo(key: Key, asked: Asked, turns: int | None = None) -> tuple[Key, Turn]:
    """A contestant that records its seeds; it cannot go on after so many turns."""

    def turn(tasks: list[RaceTask]) -> list[RaceRun]:
        if turns is not None and sum(other == key for other, _ in asked) == turns:
            raise Unable("it ended: killed")
        asked.append((key, [task.seed for task in tasks]))
        return [run(2.0) for _ in tasks]

    return key, turn


@pytest.mark.parametrize("together", [False, True])
def test_contestants_take_turns_and_the_first_round_warms_up(together: bool):
    asked: Asked = []
    told: list[str] = []
    both = dict([echo(PLAIN, asked), echo(("b", 1), asked)])
    result = bench.race(both, of_batch([TASK], 2), 2, together=together, report=told.append)
    seeds = [[3, 4], [5, 6], [7, 8]]
    assert asked == [
        (key, part)
        for now in seeds
        for key in both
        for part in ([now] if together else [[seed] for seed in now])
    ]
    assert told[:3] == ["warming up: foretoken, plain", "warming up: b, gamma 1"] + [
        "round 1: foretoken, plain"
    ]
    assert len(result.rounds) == 2 and result.together == together and not result.unable
    assert all(len(runs) == 2 for turns in result.rounds for runs in turns.values())


@pytest.mark.parametrize("turns", [0, 1])
def test_the_others_go_on_without_one_who_cannot(turns: int):
    asked: Asked = []
    quitter, other = echo(("b", 1), asked, turns), echo(("b", 2), asked)
    result = bench.race(dict([echo(PLAIN, []), quitter, other]), [TASK], 3)
    assert result.unable == {"b": "gamma 1: it ended: killed"}  # and is not asked again
    assert sum(key == ("b", 2) for key, _ in asked) == turns  # nor is the rest of its side
    assert len(result.rounds) == 3 and all(list(each) == [PLAIN] for each in result.rounds)


def test_our_own_failure_ends_the_race():
    def broken(tasks: list[RaceTask]) -> list[RaceRun]:
        raise NumericsError("target logits are NaN")

    with pytest.raises(NumericsError):
        bench.race({PLAIN: broken}, [TASK], 1)


def test_an_interrupted_turn_ends_the_race(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*_: object, **__: object):
        raise KeyboardInterrupt

    spec = pair()
    turn = partial(own, spec, gamma=0)
    monkeypatch.setattr(spec.target, "score", interrupted)
    with pytest.raises(KeyboardInterrupt):
        turn([TASK, TASK])
    assert bench.race({PLAIN: turn}, [TASK], 1).rounds == []


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


SPIN = "lambda: any(False for _ in iter(int, 1))"  # a thread that never rests


@pytest.fixture
def stranger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "stranger.py"
    script.write_text(SCRIPT)
    monkeypatch.setattr(bench, "command", lambda name: [sys.executable, str(script)])
    with Peer("stranger", "target", None, "bfloat16", None) as found:
        yield found


def test_a_peer_is_asked_in_json_lines(stranger: Peer):
    about = {"version": "1", "precision": {"weights": "bfloat16"}, "note": False}
    assert stranger.about == about
    assert [*stranger.run([TASK], 4), *stranger.run([OTHER], 4)] == [
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


def test_a_peer_that_waits_takes_no_processor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "busy.py"
    script.write_text(f"import threading\nthreading.Thread(target={SPIN}, daemon=True).start()\n")
    script.write_text(script.read_text() + SCRIPT)
    monkeypatch.setattr(bench, "command", lambda name: [sys.executable, str(script)])
    with Peer("stranger", "target", None, "bfloat16", None) as busy:
        for gamma in (4, 5):
            assert busy.run([TASK], gamma)[0].tokens == [1] * 12
            process = psutil.Process(busy._process.pid)
            while process.status() != psutil.STATUS_STOPPED:
                sleep(0.01)
            before = process.cpu_times()
            sleep(0.2)
            assert process.cpu_times() == before


def test_a_peer_is_given_its_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    script = tmp_path / "setting.py"
    reply = 'json.dumps({"version": json.loads(sys.stdin.readline())["setting"]})'
    script.write_text(f"import json, sys\nprint({reply})")
    monkeypatch.setattr(bench, "command", lambda name: [sys.executable, str(script)])
    for name, setting in (("llama.cpp", ""), ("llama.cpp:q4_0", "q4_0")):
        with Peer(name, "target", None, "int8", None) as peer:
            assert peer.name == name and peer.about == {"version": setting}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama.cpp:f16", "llama.cpp:same-precision or llama.cpp:q4_0"),
        ("transformers:compiled", "transformers"),
    ],
)
def test_an_unknown_setting_of_a_peer_is_refused(name: str, told: str):
    with pytest.raises(InputError, match=f"no setting '[a-z0-9]+'; give {told}$"):
        bench.command(name)


def test_what_is_no_peer():
    with pytest.raises(InputError, match="'vllm'; give one of transformers, openvino-genai, onnx"):
        bench.command("vllm")


def test_a_peer_without_its_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    scripts = tmp_path / "benchmarks" / "peers"
    scripts.mkdir(parents=True)
    monkeypatch.setattr(bench, "REPOSITORY", tmp_path)
    with pytest.raises(InputError, match="needs a checkout of the repository"):
        bench.command("llama.cpp")
    for name in bench.SCRIPTS.values():
        (scripts / name).touch()
    with pytest.raises(InputError, match=r"python benchmarks/peers/make\.py llama\.cpp$"):
        bench.command("llama.cpp")
    (tmp_path / ".peers" / "llama.cpp").mkdir(parents=True)
    (tmp_path / ".peers" / "llama.cpp" / "ready").touch()
    python, script = bench.command("llama.cpp")
    assert python.startswith(str(tmp_path)) and script.endswith("peer_llama_cpp.py")
    assert bench.command("transformers")[0] == sys.executable


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
    monkeypatch.setattr("foretoken.measurement.bench.of", lambda steps: free)
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


def per_token(runs: list[RaceRun], *, together: bool = False) -> float:
    (seconds,) = Race([{PLAIN: runs}], {}, together).seconds(PLAIN)
    return seconds


def test_a_token_takes_what_came_behind_the_first_ones():
    assert per_token([run(6.0)]) == pytest.approx(0.5)  # (6 - 1) / (11 - 1)
    assert per_token([run(6.0), run(9.0, first=4)]) == pytest.approx((5 + 8) / (10 + 7))


def test_where_all_came_first_all_counts():
    assert per_token([run(6.0, tokens=3, first=3)]) == pytest.approx(2.0)


def test_ratios_are_of_one_round():
    slow: Key = ("other", 0)
    rounds: list[Round] = [
        {PLAIN: [run(2.0)], slow: [run(3.0)]},  # 2x
        {PLAIN: [run(11.0)], slow: [run(31.0)]},  # 3x
        {PLAIN: [run(2.0)], slow: [run(11.0)]},  # 10x
    ]
    assert Race(rounds, {}).faster(PLAIN, slow) == pytest.approx(3.0)
    assert Race(rounds, {}).faster(slow, PLAIN) == pytest.approx(1 / 3)


def test_figures_of_a_stranger():
    key: Key = ("other", 2)
    rounds: list[Round] = [
        {PLAIN: [run(11.0)], key: [run(seconds, first_seconds=seconds - 1)]}
        for seconds in (2.0, 3.0, 6.0)
    ]
    summary = Race(rounds, {}).figures(key, greedy=True)
    assert (summary.name, summary.gamma) == key
    assert summary.seconds_per_token.median == pytest.approx(0.1)
    assert summary.tokens_per_second.median == pytest.approx(10.0)
    assert summary.first_seconds.median == 2.0
    assert (summary.first_seconds.q1, summary.first_seconds.q3) == (1.5, 3.5)
    assert summary.speedup == pytest.approx(10.0)
    assert (summary.padding, summary.predicted, summary.tokens_per_call) == (None,) * 3
    assert summary.agreement == RaceAgreement(1.0, None)


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


def test_agreement_says_how_far_and_where():
    other: Key = ("other", 0)
    text = [5, 6, 7, 8]
    rounds: list[Round] = [
        {PLAIN: [RaceRun(text, 1, 0.0, 1.0)] * 2, other: [RaceRun(t, 1, 0.0, 1.0) for t in both]}
        for both in ((text, [5, 6, 0, 8]), ([5, 6, 7, 1], text))
    ]
    assert Race(rounds, {}).agreement(other) == RaceAgreement((4 + 2 + 3 + 4) / 16, 2)
    assert Race(rounds, {}).agreement(PLAIN) == RaceAgreement(1.0, None)


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
    assert Race(rounds, {}).best("foretoken") == ("foretoken", 4)
    duel = Race(rounds, {}).duel("peer")
    assert (duel.gamma, duel.peer_gamma) == (4, 8)
    assert (duel.plain, duel.best, duel.automatic) == pytest.approx((2.0, 2.0, 3.0))


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
        return [RaceRun([0] * 10, 1, 0.0, seconds, steps)] * 2

    def others(seconds: float) -> list[RaceRun]:
        return [RaceRun([0] * 9 + [i], 0, 0.0, seconds / (2 - i)) for i in range(2)]

    rounds: list[Round] = [
        {PLAIN: own(seconds), peer: others(slower * seconds)}
        for seconds, slower in ((2.0, 2), (4.0, 3), (8.0, 10))
    ]
    mine, theirs = (
        Race(rounds, {}, together=True).figures(key, greedy=True) for key in (PLAIN, peer)
    )
    rates = mine.tokens_per_second
    assert (rates.q1, rates.median, rates.q3, rates.n) == pytest.approx((3.75, 5.0, 7.5, 3))
    assert mine.speedup == 1.0 and mine.tokens_per_call == 1.0
    assert (mine.occupancy, mine.padding) == (1.0, 0.0)
    assert theirs.speedup == pytest.approx(1 / 3)  # the median of the rounds' ratios
    assert theirs.tokens_per_second.median == pytest.approx(20 / 12)
    assert theirs.agreement == RaceAgreement(19 / 20, 9)
    assert (theirs.tokens_per_call, theirs.occupancy, theirs.padding) == (None,) * 3
