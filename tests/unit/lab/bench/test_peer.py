"""Peers: what is asked of their processes, how they fail, and what starts them."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from foretoken.errors import InputError
from foretoken.lab.bench import race as peer
from foretoken.lab.bench.race import Guest, OneByOne, Peer, RaceRun, RaceTask, Unable
from foretoken.sampling.distributions import SamplingParams

TASK = RaceTask([1, 2], 12, SamplingParams(1.0), seed=3)
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
