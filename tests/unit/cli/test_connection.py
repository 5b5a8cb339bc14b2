"""Connections to servers: addresses, errors in one line, and waiting when a server asks for it. The
server is a test double (tests/foreign.py)."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from email.utils import format_datetime

import pytest

from foreign import Foreign, body, chat, refusal, replaying, said, streamed
from foretoken.cli import connection
from foretoken.cli.connection import answered, connected, get, place
from foretoken.cli.sources import TextError
from foretoken.errors import InputError


@pytest.fixture(autouse=True)
def direct(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long was waited, without waiting."""
    slept: list[float] = []
    monkeypatch.setattr(connection, "sleep", slept.append)
    return slept


def text(server: Foreign) -> str:
    """What it answers at /v1/chat/completions."""
    with connected(server.url, None) as client:
        with answered(client, "POST", "/v1/chat/completions", {}) as response:
            return response.read().decode()


def test_a_server_that_says_when_to_come_again(naps, capsys):
    at = datetime.now(UTC) + timedelta(seconds=40)
    later = [refusal(503, "the engine is loading", Retry_After="5")]
    later += [refusal(429, "full", Retry_After=format_datetime(at, usegmt=True)), said("a")]
    with replaying(chat=later) as server:
        assert '"a"' in text(server)
    assert naps[0] == 5 and 30 < naps[1] <= 40
    lines = capsys.readouterr().err.splitlines()
    assert lines[0] == "the engine is loading; again in 5 s" and len(lines) == 2


@pytest.mark.parametrize(
    ("after", "waits"), [("50", [50, 50]), ("3600", []), ("soon", []), ("0", [1] * 120)]
)
def test_patience_ends(naps, after, waits):
    with replaying(chat=[refusal(503, "loading", Retry_After=after)]) as server:
        with pytest.raises(TextError, match="^loading$"):
            text(server)
    assert naps == waits


def test_silence_ends(monkeypatch):
    monkeypatch.setattr(connection, "SILENCE", 0.2)
    with replaying(chat=[streamed(chat("a"), None)]) as server:
        with pytest.raises(TextError, match=f"^{server.url} said nothing for 0.2 s$"):
            text(server)


def test_objects_only():
    with replaying(speculation=[body({"a": 1}), body([1])]) as server:
        with connected(f"{server.url}/v1/", "key") as client:
            assert place(client) == server.url
            assert [get(client, "/v1/speculation") for _ in range(2)] == [{"a": 1}, {}]
    assert server.requests[0][2]["authorization"] == "Bearer key"


@pytest.mark.parametrize(
    ("url", "key", "says"),
    [
        ("localhost:8000", None, "url is 'localhost:8000'; give one such as http://127.0.0.1:8000"),
        ("ftp://x", None, "give one such as"),
        ("http://", None, "give one such as"),
        ("http://x:port", None, "url is 'http://x:port': "),
        ("http://127.0.0.1:9", None, "http://127.0.0.1:9 cannot be reached: "),
        ("http://127.0.0.1:9", "a\nb", "the API key holds characters that no header can"),
    ],
)
def test_what_leads_nowhere(url, key, says):
    with pytest.raises(InputError) as error, connected(url, key) as client:
        get(client, "/v1/models")
    assert says in str(error.value) and "\n" not in str(error.value)
