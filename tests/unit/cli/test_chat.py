"""`foretoken chat`, with and without `--raw`, in this process on small models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import foretoken
from console import TEMPLATE, Result, mistake
from foreign import refusal, replaying, said, streamed
from foretoken.cli import option
from foretoken.costing import pair_costs
from terminal import CTRL_C, CTRL_D, terminal
from tiny import byte_level, folder, llama


@pytest.fixture(scope="module")
def long(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with a long context."""
    place = tmp_path_factory.mktemp("long") / "target"
    return folder(place, llama(320, 2**15, eos_token_id=None), byte_level())


@pytest.fixture
def template(base: Path) -> tuple[object, ...]:
    return ("--chat-template", base / "chat.jinja")


def turns(*texts: str) -> list[dict[str, str]]:
    return [{"role": role, "content": t} for role, t in zip(["user", "assistant"] * 9, texts)]  # noqa: B905


def test_a_quick_one_is_generate_s(run, pair, template, spec):
    system = {"role": "system", "content": "Be brief."}
    sampling = {"temperature": 1.0, "max_new_tokens": 12}
    (completion,) = spec.generate(
        [system, *turns("Where?")], gamma=2, seed=3, chat_template=TEMPLATE, **sampling
    )
    flags = ("--system-prompt", "Be brief.", "--temperature", 1, "--max-new-tokens", 12)
    result = run("chat", "-q", "Where?", *pair, *template, *flags, "--seed", 3)
    assert result == Result(0, completion.text + "\n", "")
    coloured = run("chat", "-q", "Where?", *pair, *template, *flags, "--seed", 3, "--show-tokens")
    assert coloured.out.replace("[", "").replace("]", "") == result.out and "[" in coloured.out


def test_lines_are_turns(run, pair, template, spec):
    (first,) = spec.generate(turns("Where?"), gamma=2, chat_template=TEMPLATE, max_new_tokens=8)
    talk = turns("Where?", first.text, "Why?")
    (second,) = spec.generate(talk, gamma=2, chat_template=TEMPLATE, max_new_tokens=8)
    flags = (*pair, *template, "--max-new-tokens", 8)
    result = run("chat", *flags, stdin=b"Where?\nWhy?\n")
    assert result == Result(0, f"{first.text}\n{second.text}\n", "")


def test_answers_fill_what_the_context_holds(run, pair, template):
    mistake(run("chat", *pair, *template, stdin=""), "standard input is empty")
    result = run("chat", *pair, *template, stdin=b"Where?\nWhy?\n")
    assert result.code == 1  # the second turn has no room
    assert "the reply is cut off after" in result.err and "the context is full" in result.err
    assert "error: line 2: prompt 0 has" in result.err


@pytest.mark.prove
def test_answers_follow_the_generation_config_up_to_a_limit(run, template, tmp_path):
    """What is given wins, and temperature 0 is greedy; --raw and --gamma are as ever."""
    folder(tmp_path / "asks", llama(320, 2**12, eos_token_id=None), byte_level())
    suggested = {"do_sample": True, "temperature": 0.6, "top_k": 5}
    (tmp_path / "asks" / "generation_config.json").write_text(json.dumps(suggested))
    pair = ("--target", tmp_path / "asks", "--draft", "none", "--seed", 3)
    asks = foretoken.load(tmp_path / "asks", "none")

    def text(**sampling: object) -> str:
        sampling = {"max_new_tokens": 12, "seed": 3} | sampling
        return asks.generate(turns("Where?"), chat_template=TEMPLATE, **sampling)[0].text + "\n"

    few = ("--max-new-tokens", 12)
    chat = ("chat", "-q", "Where?", *pair, *template)
    assert run(*chat, *few) == Result(0, text(temperature=0.6, top_k=5), "")
    assert run(*chat, *few, "--top-k", 2).out == text(temperature=0.6, top_k=2)
    assert run(*chat, *few, "--temperature", 0).out == text()
    raw = run("chat", "-q", "It", "--raw", *pair)
    assert raw.out == asks.generate("It")[0].text + "\n"
    assert "generation config suggests" in raw.err
    told = "the reply is cut off after 1024 tokens; --max-new-tokens allows more\n"
    assert run(*chat, "--temperature", 0) == Result(0, text(max_new_tokens=1024), told)


def test_nothing_is_measured_within_or_after_an_answer(run, base, template, monkeypatch, tmp_path):
    """What steps cost is measured before the first one, and no draft is chosen on leaving."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe, measured, pieces = pair_costs.probe, list[int](), list[str]()

    def noted(*args):
        measured.append(len(pieces))
        return probe(*args)

    monkeypatch.setattr(pair_costs, "probe", noted)
    monkeypatch.setattr(
        "foretoken.cli.completion_output.format_piece", lambda text, *_: pieces.append(text) or text
    )
    load = option.TargetLoadOptions.load

    def undecided(*args, **how):
        return replace(load(*args, **how), choose=lambda spec: pytest.fail("a draft is chosen"))

    monkeypatch.setattr(option.TargetLoadOptions, "load", undecided)
    pair = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 8)
    assert run("chat", *pair, *template, stdin=b"Where?\nWhy?\n").code == 0
    assert measured == [0] and len(pieces) > 2
    pieces.clear()
    assert run("generate", "It was", *pair).code == 0
    assert measured == [0] and len(pieces) > 2


def test_raw_continues_every_line_by_itself(run, pair, spec):
    sampling = {"temperature": 1.0, "max_new_tokens": 9}
    seeds = [(7, 0), (7, 1)]
    texts = spec.generate(["It was", " /the day"], gamma=2, seed=seeds, **sampling)
    flags = ("chat", "--raw", *pair, "--temperature", 1, "--max-new-tokens", 9)
    result = run(*flags, "--seed", 7, stdin=b"It was\n\n /the day\n")
    assert result == Result(0, "".join(f"{each.text}\n" for each in texts), "")
    drawn = {run(*flags, "-q", "It was").out for _ in range(2)}  # without a seed
    assert len(drawn | {f"{texts[0].text}\n"}) == 3


def test_a_server_instead(run, monkeypatch):
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("FORETOKEN_API_KEY", "secret")
    with replaying(chat=[said("It", " was."), said("Yes."), refusal(401, "no key")]) as server:
        result = run("chat", "--url", server.url, "--top-k", 4, stdin=b"Where?\nWhy?\n")
        assert result == Result(0, "It was.\nYes.\n", "")
        first, second = server.bodies("/v1/chat/completions")
        assert first["messages"] == turns("Where?") and first["top_k"] == 4
        assert second["messages"] == turns("Where?", "It was.", "Why?")
        assert server.requests[0][2]["authorization"] == "Bearer secret"
        mistake(run("chat", "-q", "x", "--url", server.url), "no key")
    choice = {"index": 0, "text": " cold.", "finish_reason": "stop"}
    with replaying(completions=[streamed({"choices": [choice]})]) as server:
        raw = ("chat", "--raw", "--url", server.url)
        result = run(*raw, "--seed", 3, stdin=b"It was\nIt is\n")
        assert result == Result(0, " cold.\n cold.\n", "")
        bodies = server.bodies("/v1/completions")
        mistake(run(*raw, "-q", "a\udcff"), "the request is not valid text")
    assert [(body["prompt"], body["seed"]) for body in bodies] == [("It was", 3), ("It is", 4)]


@pytest.mark.prove
def test_on_a_terminal(long, template, tmp_path):
    """Ctrl-C ends an answer that would go on for long; what came is in the next prompt."""
    args = ("--target", long, "--draft", "none", "--runtime", "transformers", *template)
    with terminal("chat", *args) as screen:
        screen.until("> ")
        screen.type("Where?\n")
        screen.until("Where?\r\n")
        screen.type(CTRL_C)
        screen.until("stopped after ")
        assert int(screen.until(" tokens")) > 0
        screen.until("> ")
        screen.type("/set max_new_tokens 3\n")
        screen.until("> ")
        screen.type("Why?\n")
        screen.until("> ")
        screen.type(f"/save {tmp_path / 'talk.json'}\n")
        screen.until("saved 4 messages in")
        screen.type(CTRL_D)
        assert screen.code() == 0
    talk = json.loads((tmp_path / "talk.json").read_text())
    assert [m["role"] for m in talk] == ["user", "assistant"] * 2 and talk[1]["content"]
    assert talk[2]["content"] == "Why?"


@pytest.mark.prove
def test_quick_is_interrupted(long, template):
    args = ("--target", long, "--draft", "none", "--runtime", "transformers", *template)
    with terminal("chat", "-q", "Where?", "--show-tokens", *args, NO_COLOR="1") as screen:
        while not screen.shown.strip():
            assert screen.read(60)
        screen.type(CTRL_C)
        assert screen.code() == 130 and "Traceback" not in screen.shown
