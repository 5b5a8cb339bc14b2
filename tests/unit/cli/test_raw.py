"""`foretoken chat --raw`, in this process on small models, and by a server."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

import foretoken
from console import Result, Run, mistake
from foreign import replaying, streamed
from tiny import byte_level, folder, llama

RAW = ("chat", "--raw")


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("complete")
    folder(base / "target", llama(320, eos_token_id=None), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "bare", llama(64))
    return base


@pytest.fixture
def pair(base: Path) -> tuple[object, ...]:
    return ("--target", base / "target", "--draft", base / "draft", "--gamma", 2)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    def call(*args: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        return console(*args)

    return call


def test_every_line_is_continued_by_itself(run, pair, base):
    sampling = {"temperature": 1.0, "max_new_tokens": 9}
    prompts = ["It was", " /the day"]
    spec = foretoken.load(base / "target", base / "draft")
    completions = spec.generate(prompts, gamma=2, seed=[(7, 0), (7, 1)], **sampling)
    flags = ("--temperature", 1, "--max-new-tokens", 9, "--seed", 7)
    result = run(*RAW, *pair, *flags, stdin=b"It was\n\n /the day\n")
    assert result == Result(0, "".join(f"{each.text}\n" for each in completions), "")
    quick = run(*RAW, "-q", "It was", *pair, *flags)
    assert quick == Result(0, f"{completions[0].text}\n", "")


def test_a_seed_is_drawn_where_none_is_given(run, pair):
    flags = (*RAW, "-q", "It was", *pair, "--temperature", 1)
    assert len({run(*flags).out for _ in range(3)}) > 1  # 64 tokens are the same with odds of 1e-9


def test_stop_strings_are_held_back(run, pair):
    whole = run(*RAW, "-q", "It was", *pair).out
    result = run(*RAW, "-q", "It was", *pair, "--stop", whole[6:9])
    assert result.out == whole[: whole.index(whole[6:9])] + "\n"


def test_ids(run, base):
    (completion,) = foretoken.load(base / "bare", "none").generate([1, 2], max_new_tokens=4)
    flags = ("--target", base / "bare", "--draft", "none", "--max-new-tokens", 4)
    assert run(*RAW, "-q", "1,2", *flags).out == ",".join(map(str, completion.tokens)) + "\n"


def test_the_context_s_end_is_said(run, pair):
    result = run(*RAW, "-q", "It was", *pair, "--max-new-tokens", 500)
    assert result.code == 0 and result.err.startswith("the text is cut off after 9")


def test_a_server_instead(run, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    choice = {"index": 0, "text": " cold.", "finish_reason": "stop"}
    with replaying(completions=[streamed({"choices": [choice]})]) as server:
        result = run(*RAW, "--url", server.url, "--seed", 3, stdin=b"It was\nIt is\n")
        assert result == Result(0, " cold.\n cold.\n", "")
        bodies = server.bodies("/v1/completions")
        broken = run(*RAW, "--url", server.url, "-q", "a\udcff")  # a byte that is no text
        mistake(broken, "the request is not valid text")
    assert [(body["prompt"], body["seed"]) for body in bodies] == [("It was", 3), ("It is", 4)]


def test_mistakes(run, pair):
    mistake(run(*RAW, *pair), "standard input is empty")
    mistake(run(*RAW, "-q", "x", *pair, "--min-new-tokens", 99), "is above max_new_tokens=64")
    mistake(run(*RAW, "-q", "x", "--url", "http://127.0.0.1:9", *pair), "--target is for")
    mistake(run(*RAW, "-q", "x", "--typical-p", 0.5, "--url", "x"), "x cannot be reached: ")
    mistake(run(*RAW, "--system-prompt", "S"), "--system-prompt is for messages")
    mistake(run(*RAW, "--chat-template", "f"), "--chat-template is for messages")
