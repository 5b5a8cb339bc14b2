"""A server on a free port of this machine, for tests."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from threading import Thread
from typing import Any

import httpx2

from engines import loaded
from foretoken.server.options import ServerOptions
from foretoken.server.process.client import Child, EngineClient
from foretoken.server.process.fleet import ServedModels
from foretoken.server.process.messages import EngineSetup
from foretoken.server.run import HttpServer
from tiny import byte_level, folder, llama

LOADING = {"runtime": "transformers", "dtype": "float64"}
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def pair(base: Path, template: str | None = TEMPLATE) -> tuple[str, str]:
    """Folders of a tiny target and draft with a byte-level tokenizer, and a chat template."""
    tokenizer = deepcopy(byte_level())
    tokenizer.chat_template = template
    folder(base / "target", llama(320, 1024), tokenizer)
    folder(base / "draft", llama(320, 1024, 1, num_hidden_layers=1), tokenizer)
    return str(base / "target"), str(base / "draft")


@contextmanager
def serving(
    target: str,
    draft: str | None,
    settings: ServerOptions | None = None,
    *,
    begin: Callable[[EngineSetup], Child] = loaded,
    **engine: Any,
) -> Iterator[tuple[str, EngineClient]]:
    """The server's address, and its link to the engine, once it is ready. `begin`: what starts it,
    in a thread, or `spawn` in a process of its own."""
    settings = settings or ServerOptions("tiny", drain=1.0)
    keywords: Any = {"max_rows": 4, **engine}
    template, parser = settings.chat_template, settings.tool_parser
    setup = EngineSetup(
        target,
        draft,
        LOADING,
        keywords,
        chat_template=template,
        tool_parser=parser,
        max_pixels=settings.max_pixels,
        max_seconds=settings.max_seconds,
    )
    with serving_all({settings.name: setup}, settings, begin) as (url, links):
        yield url, links[settings.name]


@contextmanager
def serving_all(
    setups: Mapping[str, EngineSetup],
    settings: ServerOptions,
    begin: Callable[[EngineSetup], Child] = loaded,
) -> Iterator[tuple[str, dict[str, EngineClient]]]:
    """The same for the engines of several models, by name."""
    links = {name: EngineClient(setup, begin) for name, setup in setups.items()}
    models = ServedModels(links)
    listening = socket.create_server(("127.0.0.1", 0))
    server = HttpServer(models, settings)
    thread = Thread(target=lambda: asyncio.run(server.serve([listening])), daemon=True)
    thread.start()
    try:
        until(lambda: models.state in ("ready", "failed"))
        assert models.state == "ready", models.problem
        yield f"http://127.0.0.1:{listening.getsockname()[1]}", links
    finally:
        server.should_exit = True
        thread.join(30)
        listening.close()
        assert not thread.is_alive(), "the server does not end"


def until(good: Any, seconds: float = 300.0) -> None:
    """Wait until it is so; AssertionError where it never is."""
    end = time.monotonic() + seconds
    while not good():
        assert time.monotonic() < end, "it never came"
        time.sleep(0.01)


BAD_REQUESTS = json.loads((Path(__file__).parent / "unit/server/bad_requests.json").read_text())
AS_JSON = {"Content-Type": "application/json"}
HELLO = [{"role": "user", "content": "Hello"}]
LEAST: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": HELLO},
    "/v1/completions": {"prompt": "a"},
    "/v1/responses": {"input": "a"},
}


def require_refused(url: str, kind: str, path: str) -> None:
    """Every bad request of a kind of model at this path is refused in one line that names its
    field as `param`, and its remedy where the file has one; a stream before it begins."""
    wrong: list[Any] = []
    with httpx2.Client(base_url=url, timeout=60) as client:
        for param, more, *remedy in BAD_REQUESTS[kind][path]:
            body = expanded(more)
            bodies = [body.encode("latin-1")] if isinstance(body, str) else []
            if not bodies:
                body = LEAST.get(path, {}) | body
                streamed = path in LEAST and not body.keys() & {"stream", "stream_options"}
                bodies = [body, body | {"stream": True}][: 1 + streamed]
                bodies = [json.dumps(each).encode() for each in bodies]
            for each in bodies:
                answer = client.post(path, content=each, headers=AS_JSON)
                if answer.status_code not in (400, 404):
                    wrong.append((param, more, answer.text))
                    continue
                error = answer.json()["error"]
                good = error["param"] == param
                good = good and error["type"] == "invalid_request_error"
                good = good and "\n" not in error["message"] and len(error["message"]) < 600
                if not (good and all(part in error["message"] for part in remedy)):
                    wrong.append((param, more, error))
    assert not wrong, wrong


def expanded(value: Any) -> Any:
    """A value of `bad_requests.json`: {"repeat": "a", "times": 9} stands for nine of them,
    {"ids": 9, "value": 1} for an object of nine names,
    {"join": ["a", "b"]} for "ab", {"nest": 9} for a list in nine others."""
    match value:
        case {"repeat": part, "times": int(times)}:
            return expanded(part) * times
        case {"ids": int(count), "value": each}:
            return dict.fromkeys(map(str, range(count)), each)
        case {"join": parts}:
            return "".join(map(expanded, parts))
        case {"nest": int(depth)}:
            return json.loads("[" * depth + "]" * depth)
        case dict():
            return {name: expanded(each) for name, each in value.items()}
        case list():
            return [expanded(each) for each in value]
    return value
