"""`foretoken chat`, with and without `--raw`, against our own server: the same texts, colours and
counts as in process, and one line for whatever goes wrong."""

from __future__ import annotations

import io
import os
import re
import signal
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import httpx2
import pytest

from console import Result, mistake
from foretoken.cli.remote_model import RemoteModel, get_json, open_remote_model
from foretoken.cli.reply import ChatReply, ReplyError
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import EngineClient, spawn
from served import LOADING, pair, serving, until

pytestmark = pytest.mark.daily

TALK = [{"role": "user", "content": "Where?"}]
SAMPLED = ("--temperature", 1, "--gamma", 2, "--max-new-tokens", 30, "--seed", 4)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    return pair(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def server(folders: tuple[str, str]) -> Iterator[tuple[str, EngineClient]]:
    with serving(*folders) as running:
        yield running


@pytest.fixture
def here(folders: tuple[str, str]) -> tuple[object, ...]:
    loading = (part for name, value in LOADING.items() for part in (f"--{name}", value))
    return ("--target", folders[0], "--draft", folders[1], *loading)


@pytest.fixture
def there(server: tuple[str, EngineClient]) -> tuple[object, ...]:
    return ("--url", server[0])


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.mark.parametrize("raw", [(), ("--raw",)])
@pytest.mark.parametrize(
    "sampling",
    [
        (*SAMPLED, "--stop", "the", "--stop", "e", "--include-stop-string"),
        (*SAMPLED, "--top-k", 9, "--repetition-penalty", 1.3, "--logit-bias", '{"5": -2}'),
        (*SAMPLED, "--rule", "speculative", "--lenience", 0.5),
    ],
)
def test_the_same_here_and_there(console, here, there, raw, sampling):
    own = console("chat", *raw, "-q", "It was naïve", *here, *sampling)
    lenient = "lenience 0.5: replies do not have the target's distribution\n"
    assert own.err == (lenient if "--lenience" in sampling else "")
    assert own.code == 0 and len(own.out) >= 2
    assert console("chat", *raw, "-q", "It was naïve", *there, *sampling) == own


@pytest.mark.parametrize("raw", [(), ("--raw",)])
def test_colours_are_the_same(console, here, there, raw):
    """Of every token; here they are marks. The text has whole characters only: halves are spelled
    otherwise by a server, which shows each token by itself."""
    shown = ("--regex", "[a-z ]{20,40}", "--show-tokens")
    command_line = ("chat", *raw, "-q", "It was", *SAMPLED, *shown)
    own = console(*command_line, *here)
    assert own.code == 0 and own.out.count("[") > 2 and own.err == ""
    assert console(*command_line, *there) == own
    assert re.sub(r"\[[^]]*\]", "", own.out).strip()  # some draft tokens are accepted


def opened(url: str, *, messages: bool = True, **how: object):
    return open_remote_model(url, None, None, None, messages=messages, seed=1, speculation=how)


def answered(source: RemoteModel, prompt, **sampling) -> tuple[str, ChatReply]:
    reply = ChatReply()
    return "".join(part.text for part in source.stream_reply(prompt, sampling, 0, reply)), reply


def test_what_a_reply_counts_and_leaving_frees_the_row(server):
    with opened(server[0], gamma=2) as source:
        _, reply = answered(source, TALK, temperature=1.0, max_new_tokens=30)
        assert source.name.startswith(f"tiny at {server[0]}, ")
        assert (
            reply.tokens == 30 and reply.finish_reason == "length" and 0 < reply.num_forwards <= 30
        )
        assert 0 < sum(reply.overlaps) / len(reply.overlaps) < 1
        reply = ChatReply()
        with closing(source.stream_reply(TALK, {"ignore_eos": True}, 0, reply)) as parts:
            next(parts)
        assert reply.finish_reason is None
        until(lambda: get_json(source.client, "/speculation")["running"] == 0)


def test_what_the_server_refuses(console, there):
    long = "It was " * 2000
    mistake(console("chat", "--raw", "-q", long, *there), "1024 tokens")
    mistake(console("chat", "-q", "x", *there, "--model", "tinny"), "'tinny' is not served here")
    mistake(console("chat", "-q", "x", *there, "--regex", "["), "regex")
    mistake(console("chat", "-q", "x", *there, "--presence-penalty", 3), "presence_penalty")
    mistake(console("chat", "-q", "x", *there, "--chat-template", __file__), "--chat-template")


def test_keys(console, folders, monkeypatch):
    settings = ServerOptions("tiny", api_key=("secret",), drain=1.0)
    with serving(*folders, settings) as (url, _):
        command_line = ("chat", "--raw", "-q", "It was", "--url", url, "--max-new-tokens", 2)
        mistake(console(*command_line), "give --api-key, or FORETOKEN_API_KEY")
        mistake(console(*command_line, "--api-key", "wrong"), "the API key is missing or wrong")
        assert console(*command_line, "--api-key", "secret").code == 0
        monkeypatch.setenv("FORETOKEN_API_KEY", "secret")
        assert console(*command_line).code == 0


def test_a_server_without_a_chat_template(console, tmp_path: Path):
    with serving(*pair(tmp_path, None)) as (url, _):
        mistake(console("chat", "-q", "It was", "--url", url), "give --chat-template FILE")
        assert console("chat", "--raw", "-q", "It was", "--url", url).code == 0
        talk = {"role": "user", "content": "a"}
        for path, field, value in (
            ("chat/completions", "messages", [talk]),
            ("responses", "input", "a"),
        ):
            answer = httpx2.post(f"{url}/v1/{path}", json={"model": "tiny", field: value})
            error = answer.json()["error"]
            assert answer.status_code == 400 and "no chat template" in error["message"]
            assert error["param"] == field


@pytest.mark.prove
def test_an_engine_that_dies_is_one_line_and_comes_back(folders):
    """The server is asked again when it says so."""
    with serving(*folders, begin=spawn) as (url, link), opened(url) as source:
        reply = ChatReply()
        with closing(source.stream_reply(TALK, {"ignore_eos": True}, 0, reply)) as parts:
            next(parts)
            os.kill(link.info.pid, signal.SIGKILL)
            with pytest.raises(ReplyError) as error:
                list(parts)
        assert "\n" not in str(error.value) and reply.finish_reason is None
        assert answered(source, TALK, max_new_tokens=3)[1].tokens == 3


def test_piped(console, here, there, monkeypatch):
    """Turns of a conversation, kept by the client."""

    def piped(*args: object) -> Result:
        lines = io.TextIOWrapper(io.BytesIO(b"Where?\nWhy?\n"), encoding="utf-8")
        monkeypatch.setattr(sys, "stdin", lines)
        return console("chat", *args, "--max-new-tokens", 12, "--gamma", 2)

    own = piped(*here)
    assert own.code == 0 and own.out.count("\n") >= 2
    assert piped(*there) == own
