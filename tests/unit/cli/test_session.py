"""Prompts one after the other: single, piped and typed; the source is a stand-in that says what it
is told to, but on the terminal, where it is a server (tests/foreign.py)."""

from __future__ import annotations

import io
import json
import re
import sys
from collections.abc import Generator, Mapping
from typing import Any

import pytest
import typer

from console import Result
from foreign import body, chat, replaying, said, streamed
from foretoken.cli import session
from foretoken.cli.option import DEFAULT_ANSWER_TOKENS
from foretoken.cli.reply import ChatReply, ReplyError, ReplyPart, ReplyToken
from foretoken.errors import InputError
from foretoken.sampling.params import SamplingParams
from terminal import CTRL_C, CTRL_D, terminal


class Said:
    """Answers by list: a text, which comes letter by letter, or an error, which follows the text
    behind it."""

    name = "said"

    def __init__(
        self,
        *answers: str | tuple[str, BaseException],
        plain: float | None = None,
        bias: float = 0.0,
    ) -> None:
        self.plain_seconds_per_token, self.bias = plain, bias  # seconds; of a whole answer
        self.answers, self.asked = list(answers), list[tuple[Any, dict[str, Any], int]]()

    def get_default_options(self, *, messages: bool) -> dict[str, Any]:
        return {"top_k": 7, "max_new_tokens": DEFAULT_ANSWER_TOKENS} if messages else {}

    def get_plain_seconds(self, sampling: Mapping[str, Any]) -> float | None:
        return self.plain_seconds_per_token

    def require(self, sampling: Mapping[str, Any]) -> None:
        SamplingParams(**sampling)
        if "typical_p" in sampling:
            raise InputError("typical_p is nothing here")

    def stream_reply(
        self, prompt: Any, sampling: Mapping[str, Any], number: int, reply: ChatReply
    ) -> Generator[ReplyPart]:
        self.asked.append((prompt, dict(sampling), number))
        answer, reply.bias = self.answers.pop(0), self.bias
        text, error = answer if isinstance(answer, tuple) else (answer, None)
        for letter in text:
            reply.tokens += 1
            yield ReplyPart(letter, [ReplyToken(letter, "accepted")])
        if error is not None:
            raise error
        reply.finish_reason = "length" if text.endswith("...") else "stop"


USER, ASSISTANT = "user", "assistant"


def turns(*texts: str) -> list[dict[str, str]]:
    roles = [USER, ASSISTANT] * len(texts)
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run a session; `typed`: lines on a terminal, the last of which is Ctrl-D; `piped`: others."""

    def call(source, *, typed=None, piped=None, quick=None, talk=True, sampling=None) -> Result:
        stdin = io.TextIOWrapper(io.BytesIO(piped or b""), encoding="utf-8")
        stdin.isatty = lambda: typed is not None
        monkeypatch.setattr(sys, "stdin", stdin)
        lines = list(typed or [])

        def line(_: str) -> str:
            if not lines:
                raise EOFError
            if isinstance(lines[0], BaseException):
                raise lines.pop(0)
            return lines.pop(0)

        monkeypatch.setattr("builtins.input", line)
        monkeypatch.setattr(session.signal, "signal", lambda *_: None)
        messages, code = [] if talk else None, 0
        try:
            session.run_session(
                source, sampling or {}, show_tokens=False, quick=quick, messages=messages
            )
        except typer.Exit as end:
            code = end.exit_code
        return Result(code, *capsys.readouterr())

    return call


# A single prompt


def test_one_answer(run):
    source = Said("Well.")
    assert run(source, quick="Hi") == Result(0, "Well.\n", "")
    assert source.asked == [(turns("Hi"), {}, 0)]
    assert run(Said("..."), quick="Hi", talk=False, sampling={"max_new_tokens": 3}).err == ""
    assert run(Said("..."), quick="Hi", sampling={"max_new_tokens": 3}).err == ""
    cut = run(Said("..."), quick="Hi", talk=False)
    assert cut.err == "the reply is cut off after 3 tokens: the context is full\n"


def test_one_that_fails(run):
    assert run(Said(("We", ReplyError("gone"))), quick="Hi") == Result(1, "We\n", "error: gone\n")
    assert run(Said(("", ReplyError("gone"))), quick="Hi") == Result(1, "", "error: gone\n")
    with pytest.raises(InputError, match="no such"):  # a mistake: for the console script
        run(Said(("", InputError("no such"))), quick="Hi")
    with pytest.raises(KeyboardInterrupt):  # Typer's exit code for it is 130
        run(Said(("We", KeyboardInterrupt())), quick="Hi")


# Standard input


def test_lines_are_messages_and_only_answers_are_printed(run):
    source = Said("a", "b")
    piped = b"Hi\n\n /help\\ \n"
    assert run(source, piped=piped) == Result(0, "a\nb\n", "")
    assert [question[0] for question in source.asked] == [
        turns("Hi"),
        turns("Hi", "a", " /help\\ "),
    ]
    source = Said("a", "b")
    assert run(source, piped=b"Hi\r\nHo", talk=False).out == "a\nb\n"
    assert source.asked == [("Hi", {}, 0), ("Ho", {}, 1)]


def test_a_line_that_fails_leaves_the_others(run):
    source = Said(("ab", ReplyError("gone")), ("", InputError("too long")), "c")
    result = run(source, piped=b"1\n2\n3\n")
    assert result == Result(1, "ab\nc\n", "error: line 1: gone\nerror: line 2: too long\n")
    assert source.asked[2][0] == turns("1", "ab", "3")


def test_standard_input_without_a_line(run):
    for piped in (b"", b"\n \n"):
        with pytest.raises(InputError, match="standard input is empty"):
            run(Said(), piped=piped)
    with pytest.raises(InputError, match="standard input is not valid text"):
        run(Said(), piped=b"\xff\n")


# A terminal


def test_turns_and_commands(run, tmp_path):
    source, file = Said("b", "d", "f", "h", "j"), tmp_path / "talk.json"
    typed = ["a", "", "c", "/undo", "/system Be brief.", "e", f"/save {file}", "/reset", "g"]
    result = run(source, typed=[*typed, f"/load {file}", "i", "/exit", "never"])
    assert result.code == 0 and result.out == "b\nd\nf\nh\nj\n"
    system = {"role": "system", "content": "Be brief."}
    assert [question[0] for question in source.asked] == [
        turns("a"),
        turns("a", "b", "c"),
        [system, *turns("a", "b", "e")],
        [system, *turns("g")],
        [system, *turns("a", "b", "e", "f", "i")],
    ]
    assert json.loads(file.read_text()) == [system, *turns("a", "b", "e", "f")]
    assert [number for _, _, number in source.asked] == [0, 1, 2, 3, 4]
    assert result.err.splitlines()[:2] == [
        "said; /help lists the commands, Ctrl-D leaves",
        "removed: c",
    ]


def test_options_are_set_and_checked(run):
    source = Said("a", "b")
    typed = ["/set temperature 0.5", "x", "/set", "/set temperature", "/set top_k 3", "/set top_k"]
    wrong = ["/set temperature -1", "/set typical_p 0.5", "/set nonsense 1", "/set top_k x"]
    result = run(source, typed=[*typed, "y", *wrong])
    assert [sampling for _, sampling, _ in source.asked] == [{"temperature": 0.5}, {}]
    lines = result.err.splitlines()[1:-1]
    assert lines[:4] == ["temperature is 0.5", "temperature is 0.0", "top_k is 3", "top_k is 7"]
    listed = dict(line.split(maxsplit=1) for line in result.out.splitlines()[1:-1])
    assert listed["temperature"] == "0.5" and listed["top_k"] == "7"  # what the model asks for
    assert listed["max_new_tokens"] == "1024" and listed["stop_strings"] == "null"
    assert "typical_p" not in listed and "structured" in listed
    assert [line.split(";")[0] for line in lines[4:]] == [
        "error: temperature is -1.0",
        "error: typical_p is nothing here",
        "error: nonsense is unknown here",
        "error: top_k is 'x'",
    ]


def test_plain_text_has_no_turns(run):
    source = Said("a", "b")
    result = run(source, typed=["x", "//y", "/undo", "/help"], talk=False)
    assert [question[0] for question in source.asked] == ["x", "/y"]
    assert "/undo is not a command" in result.err and "/system" not in result.out
    for name in ("/set [NAME VALUE]", "/stats", "/exit", "//..."):
        assert name in result.out


def test_stats_are_of_the_last_text(run):
    told = run(Said("abc", ("d", KeyboardInterrupt())), typed=["x", "/stats", "y", "/stats"]).err
    assert re.findall(r"^(\d tokens), \d\.\d\d s$", told, re.M) == ["3 tokens", "1 tokens"]
    lenient = run(Said("abc", bias=0.6), typed=["x", "/stats"]).err
    assert "3 tokens, 0.2000 from the target's distribution (mean over tokens), 0.0" in lenient


def test_the_pace_of_an_answer_beside_plain_decoding(run):
    """But for the first, whose time is also that of a runtime's first passes."""
    told = run(Said("A good answer", "A good answer", plain=1e9), typed=["Hi", "Ho"]).err
    lines = re.findall(r"^13 tokens, the first after 0.00 s, then \d+ tokens/s(.*)$", told, re.M)
    assert lines[0] == "" and re.match(
        r", about \d+\.\d\d times as fast as plain decoding", lines[1]
    )
    alone = run(Said("A good answer"), typed=["Hi"]).err
    assert "tokens/s\n" in alone and "plain" not in alone
    assert "tokens/s" not in run(Said("No"), typed=["Hi"]).err  # too short to tell


def test_a_developer_s_message_is_a_head_too(run, tmp_path):
    file, source = tmp_path / "talk.json", Said("a", "b")
    head = {"role": "developer", "content": "Be brief."}
    file.write_text(json.dumps([head, *turns("x", "y")]))
    run(source, typed=[f"/load {file}", "/reset", "c", "/system Be long.", "d"])
    assert source.asked[0][0] == [head, *turns("c")]
    system = {"role": "system", "content": "Be long."}
    assert source.asked[1][0] == [system, *turns("c", "a", "d")]


@pytest.mark.parametrize(
    ("value", "given"),
    [
        ("top_p 1e-1", {"top_p": 0.1}),
        ("ignore_eos true", {"ignore_eos": True}),
        ("stop_strings the end", {"stop_strings": "the end"}),
        ('stop_strings ["\\n", "b"]', {"stop_strings": ["\n", "b"]}),
        ('logit_bias {"5": -2.5}', {"logit_bias": {"5": -2.5}}),
        ('structured {"regex": "a b+"}', {"structured": {"regex": "a b+"}}),
    ],
)
def test_values_are_those_of_a_line_of_a_file(run, value, given):
    source = Said("a")
    run(source, typed=[f"/set {value}", "x"])
    assert source.asked[0][1] == given


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (None, "there is no such file; give a file with messages"),
        ("[{", "talk.json is not a valid conversation: "),
        ("{}", "messages is {}; give a list of messages"),
        ('[{"role": "user"}]', "message 0 has the content None"),
    ],
)
def test_files_that_hold_no_conversation(run, tmp_path, content, says):
    source, file = Said("b", "d"), tmp_path / "talk.json"
    if content is not None:
        file.write_text(content)
    result = run(source, typed=["a", f"/load {file}", "c"])
    assert says in result.err and source.asked[1][0] == turns("a", "b", "c")


def test_what_ctrl_c_leaves_of_an_answer_is_kept(run):
    source = Said(("We", KeyboardInterrupt()), ("", KeyboardInterrupt()), "d")
    result = run(source, typed=["a", "b", "c"])
    assert result.out == "We\nd\n" and source.asked[2][0] == turns("a", "We", "c")
    assert "stopped after 2 tokens\nstopped after 0 tokens\n" in result.err


def test_the_limit_that_cuts_an_answer_is_told(run, monkeypatch):
    told = run(Said("..."), typed=["x"], sampling={"max_new_tokens": 3}).err
    assert "the reply is cut off after 3 tokens; /set max_new_tokens allows more" in told
    monkeypatch.setattr(session, "DEFAULT_ANSWER_TOKENS", 3)
    said = "the reply is cut off after 3 tokens; {} allows more\n"
    assert run(Said("..."), piped=b"x\n").err == said.format("--max-new-tokens")
    assert said.format("/set max_new_tokens") in run(Said("..."), typed=["x"]).err


def test_mistakes_end_nothing(run):
    mistakes = {
        "/zzzz": "/zzzz is not a command; /help lists all commands",
        "/": "/ is not a command; /help lists all commands",
        "/undo": "there is no turn to remove",
        "/undo 2": "give the command as /undo",
        "/save": "give the command as /save FILE",
        "/save /no/such/x": "x cannot be written: there is no folder /no/such; make that folder",
        "/load /no/such/file": "there is no such file",
        "/stats": "there is no reply yet",
    }
    result = run(Said("a"), typed=[*mistakes, "x"])
    told = result.err.splitlines()[1:-1]
    assert result.code == 0 and result.out == "a\n"
    assert all(says in each for says, each in zip(mistakes.values(), told, strict=True))


def test_errors_end_nothing(run):
    source = Said(("a", ReplyError("gone")), ("", InputError("too long")), "...")
    result = run(source, typed=["x", "y", "z"], sampling={"max_new_tokens": 9})
    assert result.code == 0 and result.out == "a\n...\n"
    assert result.err.splitlines()[1:-1] == [
        "error: gone",
        "error: too long",
        "the reply is cut off after 3 tokens: the context is full",
    ]


def test_lines_that_go_on(run):
    source = Said("1", "2")
    typed = ["a\\", " b\\", "c", "x\\", KeyboardInterrupt(), "y", KeyboardInterrupt(), "never"]
    result = run(source, typed=typed, talk=False)
    assert [question[0] for question in source.asked] == ["a\n b\nc", "y"] and result.code == 0


# A terminal of its own, with keys


@pytest.fixture
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


def test_keys(direct):
    """Ctrl-C in the middle of an answer keeps what came; at a line it clears it; Ctrl-D leaves."""
    slow = streamed(chat("Once upon"), None, chat(" a time", "stop"))
    with replaying(chat=[slow, said("Yes."), said("Bye.")]) as server:
        with terminal("chat", "--url", server.url) as screen:
            screen.until("Ctrl-D leaves")
            screen.until("> ")
            screen.type("Hi\n")
            screen.until("Once upon")
            screen.type(CTRL_C)
            screen.until("stopped after")
            screen.until("> ")
            screen.type("half a line")
            screen.until("half a line")  # Ctrl-C would take what nobody has read yet
            screen.type(CTRL_C)
            screen.until("\n> ")
            screen.type("and\\\n")
            screen.until("... ")
            screen.type("then?\x01\x01so, \x05\n")  # edited: at the line's begin and end
            screen.until("Yes.")
            screen.until("> ")
            screen.type(CTRL_D)
            assert screen.code() == 0
    bodies = [each["messages"] for each in server.bodies("/v1/chat/completions")]
    assert bodies == [turns("Hi"), turns("Hi", "Once upon", "and\nso, then?")]


@pytest.mark.prove
def test_ctrl_c_at_an_empty_prompt_leaves(direct):
    with replaying(chat=[said("a")]) as server, terminal("chat", "--url", server.url) as screen:
        screen.until("> ")
        screen.type(CTRL_C)
        assert screen.code() == 0
    with replaying(completions=[streamed(None)]) as server:
        with terminal("chat", "--raw", "--url", server.url) as screen:
            screen.until("> ")
            screen.type("Hi\n")
            screen.until("Hi")
            screen.process.terminate()
            assert screen.code() == 130, screen.shown


@pytest.mark.prove
def test_colours_on_a_terminal(direct):
    step = {"tokens": [{"id": 1, "text": " yes", "source": "accepted"}]}
    step |= {"rejected": [], "overlaps": [0.9]}
    answer = streamed(chat(" yes", "stop") | {"speculation": {"steps": [step]}})
    facts = body({"target": "t", "draft": "d", "chat": True})
    with replaying(chat=[answer], speculation=[facts]) as server:
        with terminal("chat", "--url", server.url, "--show-tokens", NO_COLOR="") as screen:
            assert "accepted draft token" in screen.until("> ")
            screen.type("Hi\n")
            screen.until("\x1b[32m yes\x1b[0m")
            screen.until("> ")
            screen.type("/stats\n")
            assert "1 tokens in 1 target forwards (1.00 per forward), alpha 0.90" in screen.until(
                "> "
            )
            screen.type("/exit\n")
            assert screen.code() == 0
