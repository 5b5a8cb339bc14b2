"""`foretoken chat`, in this process on small models."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

import foretoken
from console import Result, Run, mistake
from foreign import refusal, replaying, said
from foretoken.cli import option
from foretoken.costing import pair_costs
from terminal import CTRL_C, CTRL_D, terminal
from tiny import byte_level, folder, llama

TEMPLATE = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}assistant:"


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders `target` and `draft`, without a chat template; one in a file; and a long context."""
    base = tmp_path_factory.mktemp("chat")
    folder(base / "target", llama(320, eos_token_id=None), byte_level())
    folder(base / "draft", llama(320, seed=1, num_hidden_layers=1), byte_level())
    folder(base / "long", llama(320, 2**15, eos_token_id=None), byte_level())
    (base / "chat.jinja").write_text(TEMPLATE)
    return base


@pytest.fixture
def pair(base: Path) -> tuple[object, ...]:
    return ("--target", base / "target", "--draft", base / "draft", "--gamma", 2)


@pytest.fixture
def template(base: Path) -> tuple[object, ...]:
    return ("--chat-template", base / "chat.jinja")


@pytest.fixture(scope="module")
def spec(base: Path) -> foretoken.Speculator:
    return foretoken.load(base / "target", base / "draft")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, console: Run) -> Run:
    """Call the console script; `stdin`: what is piped in."""

    def call(*args: object, stdin: bytes = b"") -> Result:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin), encoding="utf-8"))
        return console(*args)

    return call


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


def test_variables_of_a_template(run, pair, base, spec):
    (base / "named.jinja").write_text("{{ name }}: {{ messages[-1].content }}")
    flags = ("--chat-template", base / "named.jinja", "--chat-template-kwargs", '{"name": "It"}')
    (completion,) = spec.generate("It: was", gamma=2, max_new_tokens=5)
    result = run("chat", "-q", "was", *pair, *flags, "--max-new-tokens", 5)
    assert result.out == completion.text + "\n"


def test_answers_fill_what_the_context_holds(run, pair, template):
    result = run("chat", *pair, *template, stdin=b"Where?\nWhy?\n")
    assert result.code == 1  # the second turn has no room
    assert "the text is cut off after" in result.err and "there is room for no more" in result.err
    assert "error: line 2: prompt 0 has" in result.err


@pytest.mark.prove
def test_answers_follow_the_generation_config_up_to_a_limit(run, template, base, spec):
    """What is given wins, and temperature 0 is greedy; --raw and --gamma are as ever."""
    folder(base / "asks", llama(320, 2**12, eos_token_id=None), byte_level())
    suggested = {"do_sample": True, "temperature": 0.6, "top_k": 5}
    (base / "asks" / "generation_config.json").write_text(json.dumps(suggested))
    pair = ("--target", base / "asks", "--draft", "none", "--seed", 3)
    asks = foretoken.load(base / "asks", "none")

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
    told = "the text is cut off after 1024 tokens; --max-new-tokens allows more\n"
    assert run(*chat, "--temperature", 0) == Result(0, text(max_new_tokens=1024), told)


def test_nothing_is_measured_within_or_after_an_answer(run, base, template, monkeypatch, tmp_path):
    """What steps cost is measured before the first one, and no draft is chosen on leaving."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    probe, measured, pieces = pair_costs.probe, list[int](), list[str]()

    def noted(*args):
        measured.append(len(pieces))
        return probe(*args)

    monkeypatch.setattr(pair_costs, "probe", noted)
    monkeypatch.setattr("foretoken.cli.answer.piece", lambda text, *_: pieces.append(text) or text)
    load = option.Loading.load

    def undecided(*args, **how):
        return replace(load(*args, **how), choose=lambda spec: pytest.fail("a draft is chosen"))

    monkeypatch.setattr(option.Loading, "load", undecided)
    pair = ("--target", base / "target", "--draft", base / "draft", "--max-new-tokens", 8)
    assert run("chat", *pair, *template, stdin=b"Where?\nWhy?\n").code == 0
    assert measured == [0] and len(pieces) > 2
    pieces.clear()
    assert run("generate", "It was", *pair).code == 0
    assert measured == [0] and len(pieces) > 2


def test_mistakes(run, pair, template, base):
    mistake(run("chat", "-q", "x", *pair), "give --chat-template FILE, or continue plain text")
    mistake(run("chat", "-q", "x"), "has no chat template")  # the pair that ships
    mistake(run("chat", *pair, *template), "standard input is empty")
    mistake(run("chat", "-q", " ", *pair, *template), "--quick is empty")
    mistake(run("chat", "-q", "x", *pair, "--chat-template", base / "no"), "there is no such file")
    mistake(run("chat", "-q", "x" * 200, *pair, *template), "the model holds 96")


def test_one_that_fails(run, pair, template):
    every = ",".join(map(str, range(320)))
    result = run("chat", "-q", "x", *pair, *template, "--suppress-tokens", every)
    assert result.code == 1 and result.out == "" and result.err.startswith("error: ")
    assert result.err.count("\n") == 1


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
        assert json.dumps(server.requests[-1][1])
    mistake(run("chat", "-q", "x", "--url", server.url), "cannot be reached")


@pytest.mark.prove
def test_on_a_terminal(base, template):
    """Ctrl-C ends an answer that would go on for long; what came is in the next prompt."""
    args = ("--target", base / "long", "--draft", "none", "--runtime", "transformers", *template)
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
        screen.type(f"/save {base / 'talk.json'}\n")
        screen.until("4 messages are in")
        screen.type(CTRL_D)
        assert screen.code() == 0
    talk = json.loads((base / "talk.json").read_text())
    assert [m["role"] for m in talk] == ["user", "assistant"] * 2 and talk[1]["content"]
    assert talk[2]["content"] == "Why?"


@pytest.mark.prove
def test_quick_is_interrupted(base, template):
    args = ("--target", base / "long", "--draft", "none", "--runtime", "transformers", *template)
    with terminal("chat", "-q", "Where?", "--show-tokens", *args, NO_COLOR="1") as screen:
        while not screen.shown.strip():
            assert screen.read(60)
        screen.type(CTRL_C)
        assert screen.code() == 130 and "Traceback" not in screen.shown
