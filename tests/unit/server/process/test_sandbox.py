"""Grammars that take too much are refused before the engine compiles them; others never notice."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from foretoken.errors import InputError
from foretoken.sampling.checks import Structured
from foretoken.server.process import sandbox
from foretoken.server.process.sandbox import GrammarSandbox
from tiny import byte_level

FOREVER = Structured("json_schema", '{"type": "integer", "multipleOf": 99999989}')  # minutes
GOOD = Structured("regex", "[ab]{1,5}")


@pytest.fixture
def tried() -> Iterator[GrammarSandbox]:
    made = GrammarSandbox(byte_level())
    yield made
    made.close()


def test_what_takes_too_much_is_refused_and_the_next_is_tried(
    tried: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "TIMEOUT_SECONDS", 1.0)
    began = time.monotonic()
    with pytest.raises(InputError, match="takes more than 1 s"):
        tried.require(FOREVER)
    assert time.monotonic() - began < 30
    monkeypatch.setattr(sandbox, "TIMEOUT_SECONDS", 60.0)
    monkeypatch.setattr(sandbox, "MAX_MEMORY_BYTES", 2**28)
    tried.require(GOOD)
    with pytest.raises(InputError, match="to compile"):
        tried.require(FOREVER)


def test_the_process_stays_and_knows_what_was_good(tried: GrammarSandbox) -> None:
    """What is no grammar is left to who tells it."""
    tried.require(GOOD)
    process = tried._process
    assert process is not None
    for more in (("choice", json.dumps(["a", "b"])), ("regex", "a{2}"), ("lark", "start: nothing")):
        tried.require(Structured(*more))
    with pytest.raises(InputError, match="structured's choice"):
        tried.require(Structured("choice", "5"))
    assert tried._process is process and process.poll() is None
    tried.close()
    process.wait(10)
    tried.require(GOOD)  # is not tried again
    GrammarSandbox(None).require(GOOD)


def test_one_grammar_is_tried_once_for_all_who_wait_for_it(
    tried: GrammarSandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def ask(_: str, question: dict[str, str]) -> object:
        asked.append(question["grammar"])
        time.sleep(0.2)
        return {}, b""

    monkeypatch.setattr(tried, "ask", ask)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(tried.require, [GOOD] * 16))
    assert len(asked) == 1
