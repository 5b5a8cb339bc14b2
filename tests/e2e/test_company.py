"""What a request brings before its first token does not stop the texts of others: a stream runs
beside each, in a server whose engine has a process of its own."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from typing import Any

import httpx2
import pytest

from foretoken.server.options import ServerOptions
from foretoken.server.process.client import spawn
from served import TEMPLATE, serving
from tiny import byte_level, folder, llama

CONTEXT = 8192
SECONDS = 0.5  # between two events of a stream, on an idle machine
TRIES = 4  # as others may use the machine
HELLO = [{"role": "user", "content": "Hello"}]
CHAT, TEXTS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"

LONG = "The sea is calm. " * 40_000
ENDLESS = {"json": {"type": "integer", "multipleOf": 99999989}}  # minutes to compile
SLOW = {"json": {"type": "integer", "multipleOf": 49_999}}
# A path, a body, how many send it at a time, and the status of each answer
HOSTILE: dict[str, tuple[str, dict[str, Any], int, int]] = {
    "bad_words": (TEXTS, {"bad_words": ["ab " * 1333] * 900}, 1, 400),
    "empty messages": (CHAT, {"messages": [{"role": "user", "content": ""}] * 100_000}, 1, 400),
    "items": (RESPONSES, {"input": [{"role": "user", "content": ""}] * 100_000}, 1, 400),
    "stop_token_ids": (TEXTS, {"stop_token_ids": [1] * 1_000_000}, 1, 400),
    "prompts": (TEXTS, {"prompt": [[1]] * 700_000}, 1, 400),
    "ids to a text": ("/detokenize", {"tokens": [65] * 900_000}, 1, 400),
    "logit_bias": (TEXTS, {"logit_bias": dict.fromkeys(range(250_000), 1)}, 1, 400),
    "variables": (CHAT, {"messages": HELLO, "chat_template_kwargs": {"a": [{}] * 900_000}}, 1, 400),
    "stop": (TEXTS, {"stop": ["ab" * 100_000] * 16}, 1, 400),
    "a long text": (TEXTS, {"prompt": LONG}, 4, 400),
    "a long chat": (CHAT, {"messages": [{"role": "user", "content": LONG}]}, 4, 400),
    "endless grammars": (TEXTS, {"n": 4, "temperature": 1, "structured_outputs": ENDLESS}, 4, 400),
    "a long text's ids": ("/tokenize", {"prompt": LONG}, 4, 200),
    "one slow grammar": (
        TEXTS, {"n": 16, "temperature": 1, "max_tokens": 2, "structured_outputs": SLOW}, 2, 200
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    base = tmp_path_factory.mktemp("company")
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = TEMPLATE
    tokenizer.add_tokens(["-" * 96])  # as the longest of known tokenizers
    folder(base / "target", llama(321, CONTEXT), tokenizer)
    settings = ServerOptions("tiny", drain=1.0)
    with serving(str(base / "target"), "none", settings, begin=spawn, max_rows=16) as (url, _):
        yield url


def gaps(url: str, seconds: float, beside: list[Any]) -> float:
    """The largest gap between a stream's events: until `beside` is done, or `seconds` are over.
    Another stream follows one that ends before."""
    body = {"prompt": "It", "max_tokens": 8000, "ignore_eos": True, "stream": True, "seed": 1}
    body |= {"temperature": 1.0, "speculation": {"gamma": 0}}
    largest, began = 0.0, time.monotonic()
    while True:
        with httpx2.stream("POST", f"{url}{TEXTS}", json=body, timeout=120) as response:
            assert response.status_code == 200
            last = None
            for _ in response.iter_lines():
                now = time.monotonic()
                largest = max(largest, 0.0 if last is None else now - last)
                last = now
                if now - began > seconds and all(each.done() for each in beside):
                    return largest


@pytest.mark.daily("bad_words")
@pytest.mark.parametrize("name", HOSTILE)
def test_a_request_does_not_stop_the_streams_of_others(url: str, name: str) -> None:
    path, body, clients, status = HOSTILE[name]
    content = json.dumps(({"prompt": "a"} if path == TEXTS else {}) | body).encode()
    assert len(content) < 4_000_000  # or the server does not read it

    def send() -> httpx2.Response:
        headers = {"Content-Type": "application/json"}
        return httpx2.post(f"{url}{path}", content=content, headers=headers, timeout=120)

    seen: list[tuple[float, float]] = []
    for _ in range(TRIES):
        alone = gaps(url, 1.0, [])
        with ThreadPoolExecutor(clients) as pool:
            sent = [pool.submit(send) for _ in range(clients)]
            beside = gaps(url, 1.0, sent)
        for each in sent:
            assert each.result().status_code == status, each.result().text[:300]
        seen.append((alone, beside))
        if beside < SECONDS + alone:
            return
    raise AssertionError(f"largest gaps alone and beside it: {seen}")
