"""Races: peers in processes of their own, the figures of a race, and the script as it is run."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from time import sleep
from typing import Any

import psutil
import pytest

from console import Run, mistake
from console import script as command_line
from foretoken.cli import script
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
)
from foretoken.records import StepRecord
from foretoken.sampling.distributions import SamplingParams
from pairs import relative
from scripts import benchmark
from tiny import folder, llama

race = benchmark("race")
Peer, Unable = race.Peer, race.Unable
TASK = RaceTask([1, 2], 12, SamplingParams(1.0), seed=3)


@pytest.fixture(autouse=True)
def no_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(races, "REST_SECONDS", 0.0)


def run(seconds: float) -> RaceRun:
    return RaceRun(list(range(11)), 1, 1.0, seconds)


@pytest.mark.parametrize("turns", [0, 1])
def test_the_others_go_on_without_one_who_cannot(turns: int):
    asked: list[ContestantKey] = []

    def contestant(key: ContestantKey, most: int | None = None) -> RunTurn:
        def turn(tasks: list[RaceTask]) -> list[RaceRun]:
            if most is not None and asked.count(key) == most:
                raise Unable("it ended: killed")
            asked.append(key)
            return [run(2.0) for _ in tasks]

        return turn

    limits: dict[ContestantKey, int | None] = {
        PLAIN_DECODING: None,
        ("b", 1): turns,
        ("b", 2): None,
    }
    contestants = {key: contestant(key, most) for key, most in limits.items()}
    raced, unable = race.run_race(contestants, [TASK], 3)
    assert unable == {"b": "gamma 1: it ended: killed"}  # and is not asked again
    assert asked.count(("b", 2)) == turns  # nor is the rest of its side
    assert len(raced.rounds) == 3 and all(list(each) == [PLAIN_DECODING] for each in raced.rounds)


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
    path = tmp_path / "stranger.py"
    path.write_text(SCRIPT)
    monkeypatch.setattr(race, "command_of", lambda name: [sys.executable, str(path)])
    with Peer("stranger", "target", None, "bfloat16", None) as found:
        yield found


def test_a_peer_is_asked_in_json_lines(stranger: Any):
    about = {"version": "1", "precision": {"weights": "bfloat16"}, "note": False}
    assert stranger.about == about
    assert stranger.run([TASK], 4) == [RaceRun([1] * 12, 1, 0.1, 3.5)]
    both = [RaceRun([1] * 12, 2, 0.1, 3.5), RaceRun([8] * 12, 2, 0.1, 4.5)]
    assert stranger.run([TASK, OTHER], 4) == both
    process = psutil.Process(stranger._process.pid)
    while process.status() != psutil.STATUS_STOPPED:  # one that waits takes no processor
        sleep(0.01)
    for gamma, told in (
        (9, "^nine is too many$"),
        (7, "made 1 tokens, not 12"),
        (6, "its answer is not valid JSON: a library says hello"),
        (8, "^it ended: the last word$"),
        (8, "^it ended: the last word$"),
    ):
        with pytest.raises(Unable, match=told):
            stranger.run([TASK], gamma)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("llama.cpp:f16", "no setting 'f16'; give llama.cpp:same-precision or llama.cpp:q4_0 or"),
        ("transformers:compiled", "no setting 'compiled'; give transformers$"),
        ("sglang", "'sglang'"),
    ],
)
def test_what_is_no_peer(name: str, told: str):
    with pytest.raises(InputError, match=told):
        race.command_of(name)


def test_a_peer_without_its_venv(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(race, "HERE", tmp_path / "benchmarks")
    with pytest.raises(InputError, match=r"python benchmarks/peers/make\.py llama\.cpp$"):
        race.command_of("llama.cpp")
    (tmp_path / ".peers" / "llama.cpp").mkdir(parents=True)
    (tmp_path / ".peers" / "llama.cpp" / "ready").touch()
    python, file = race.command_of("llama.cpp")
    assert python.startswith(str(tmp_path)) and file.endswith("peer_llama_cpp.py")
    assert race.command_of("transformers")[0] == sys.executable


def test_agreement_says_how_far_and_where():
    other: ContestantKey = ("other", 0)
    text = [5, 6, 7, 8]
    rounds: list[RoundRuns] = [
        {
            PLAIN_DECODING: [RaceRun(text, 1, 0.0, 1.0)] * 2,
            other: [RaceRun(t, 1, 0.0, 1.0) for t in both],
        }
        for both in ((text, [5, 6, 0, 8]), ([5, 6, 7, 1], text))
    ]
    assert race.agreement(rounds, other) == {"share": (4 + 2 + 3 + 4) / 16, "first_difference": 2}
    assert race.agreement(rounds, PLAIN_DECODING) == {"share": 1.0, "first_difference": None}


def test_a_duel_is_of_each_ones_best():
    times: dict[ContestantKey, float] = {
        PLAIN_DECODING: 9.0,
        ("foretoken", 4): 3.0,
        ("foretoken", 8): 5.0,
        AUTOMATIC_GAMMA: 2.0,
        ("peer", 0): 18.0,
        ("peer", 4): 8.0,
        ("peer", 8): 6.0,
    }
    rounds: list[RoundRuns] = [
        {key: [run(1 + time * slow)] for key, time in times.items()} for slow in (1, 2, 3)
    ]
    assert race.best(Race(rounds), "foretoken") == ("foretoken", 4)
    duel = race.duel(Race(rounds), "peer")
    assert (duel.gamma, duel.peer_gamma) == (4, 8)
    assert (duel.plain, duel.best, duel.automatic) == pytest.approx((2.0, 2.0, 3.0))


def test_a_mistake_is_one_line(call: Run, pair: tuple[object, ...]):
    mistake(call(*pair, "--vs", "transformers", "--vs", "transformers"), "names a peer twice")


def batch_step(rows: int, drafted: int = 0, padded: int = 0) -> StepRecord:
    return StepRecord(
        gamma=drafted,
        draft_tokens=(0,) * drafted,
        accepted=0,
        new_tokens=(0,),
        overlaps=(),
        draft_calls=0,
        draft_seconds=0.0,
        score_seconds=0.0,
        verify_seconds=0.0,
        rows=rows,
        padding=padded,
    )


def test_places_that_are_computed_for_no_row():
    steps = [batch_step(rows) for rows in (2, 2, 2, 2, 1, 1)]  # passes of 2, 2, 1 and 1 rows
    assert race.occupancy(steps, 2) == pytest.approx(6 / 4 / 2)
    steps = [batch_step(2, 3, padded=2), batch_step(2, 1, padded=2), batch_step(1, 0, padded=1)]
    assert race.padding(steps) == pytest.approx(3 / (3 + 4 + 2 + 1))


QUICK = ("--max-new-tokens", 8, "--repeats", 2, "--gamma", "2", "--json")
FAKE = """
import json, sys
for i, line in enumerate(sys.stdin):
    asked = json.loads(line)
    if sys.argv[1] == "at load":
        reply = {"error": "Q8_0 holds blocks of 32, not 48"}
    elif i == 0:
        reply = {"version": "1", "precision": {"weights": "float32"}}
        if sys.argv[1] == "plainly":
            reply["plain_only"] = "it takes no states"
    elif sys.argv[1] == "in a round" and asked["gamma"]:
        reply = {"error": "no room for guesses"}
    else:
        text = {"tokens": [1] * asked["max_new_tokens"], "first_tokens": 1}
        reply = {"texts": [text | {"first_seconds": 0.1, "seconds": 0.5}] * len(asked["prompts"])}
    print(json.dumps(reply), flush=True)
"""


VS = ("--vs", "llama.cpp", "--vs", "openvino-genai", "--vs", "transformers")


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return command_line(monkeypatch, capsys, lambda: script.run_app(race.app))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[object, ...]:
    """A target without a tokenizer that ends texts early by itself, and two prompts."""
    base = tmp_path_factory.mktemp("pair")
    model = llama(V=64)
    model.generation_config.eos_token_id = list(range(1, 64))
    target, draft = folder(base / "target", model), folder(base / "draft", relative(model))
    prompts = base / "prompts.jsonl"
    prompts.write_text('{"prompt": [5, 17, 33]}\n{"prompt": "3,58,20,36"}\n')
    return "--target", target, "--draft", draft, "--prompts", prompts


@pytest.fixture
def peers(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, str]:
    """llama.cpp cannot load, openvino-genai cannot guess, transformers can do all."""
    fails = {"llama.cpp": "at load", "openvino-genai": "in a round", "transformers": "never"}
    (tmp_path / "fake.py").write_text(FAKE)
    fake = [sys.executable, str(tmp_path / "fake.py")]
    monkeypatch.setattr(race, "command_of", lambda name: [*fake, fails[name]])
    return fails


def test_a_peer_that_cannot_run_the_pair_is_named_and_the_others_go_on(
    call: Run, pair: tuple[object, ...], peers: dict[str, str], tmp_path: Path
):
    code, out, _ = call(*pair, *QUICK, *VS, "--out", tmp_path / "new")
    document = json.loads(out)
    assert code == 0 and document["rounds"] == 2 and not document["interrupted"]
    assert document["unable"] == {
        "llama.cpp": "Q8_0 holds blocks of 32, not 48",
        "openvino-genai": "gamma 2: no room for guesses",
    }
    names = [(row["name"], row["variant"]) for row in document["figures"]]
    own = [("foretoken", name) for name in ("plain", "gamma 2", "automatic")]
    assert names == [*own, ("transformers", "plain"), ("transformers", "gamma 2")]
    for row in document["figures"][:3]:
        assert row["agreement"] == {"share": 1.0, "first_difference": None}
    (duel,) = document["duels"]
    assert duel["name"] == "transformers" and duel["plain"] > 0 and duel["best"] > 0
    assert list(document["peers"]) == ["transformers"]
    assert json.loads((tmp_path / "new" / "bench.json").read_text()) == document
    shown = call(*pair, *QUICK[:-1], *VS)
    assert "openvino-genai cannot run this pair: gamma 2: no room" in shown.out
    assert "| transformers, gamma 2 |" in shown.out and "Against transformers: plain" in shown.out


def test_texts_at_once_and_a_peer_that_cannot_read_the_draft(
    call: Run, pair: tuple[object, ...], peers: dict[str, str]
):
    code, out, _ = call(*pair, *QUICK, "--batch", "1,3", "--draft", "lookup", *VS[4:])
    document = json.loads(out)
    assert code == 0 and [at["batch"] for at in document["batches"]] == [1, 3]
    assert document["peers"]["transformers"]["note"] == "plain only: it cannot read the draft"
    for at in document["batches"]:
        rows = [(row["name"], row["gamma"]) for row in at["figures"]]
        assert rows == [("foretoken", g) for g in (0, 2, None)] + [("transformers", 0)]
        for row in at["figures"]:
            own = row["name"] == "foretoken"
            assert (row["occupancy"] is not None) == (row["padding"] is not None) == own


@pytest.mark.prove  # a peer's process takes seconds to begin
def test_transformers_is_really_run(call: Run, pair: tuple[object, ...]):
    code, out, _ = call(*pair, *QUICK, "--batch", "1,3", "--vs", "transformers")
    document = json.loads(out)
    assert code == 0 and not document["unable"]
    for at in document["batches"]:
        assert len(at["figures"]) == 5
        assert all(row["agreement"]["share"] == 1.0 for row in at["figures"])
