"""Somebody else's server, as a test double: it replays what it is told to, path by path, and keeps
the requests. The fixture is `foreign`."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any


@dataclass
class Answer:
    """A status, headers, and a body in parts: `None` among them waits until the server is let go
    on."""

    parts: list[bytes | None]
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


@dataclass
class Foreign:
    """Its answers: of every path the first is given, and the last again and again."""

    answers: dict[str, list[Answer]]
    url: str = ""
    requests: list[tuple[str, Any, dict[str, str]]] = field(default_factory=list)
    on: Event = field(default_factory=Event)
    left: Event = field(default_factory=Event)  # a client went before its answer's end

    def bodies(self, path: str) -> list[Any]:
        return [body for place, body, _ in self.requests if place == path]

    def next(self, path: str) -> Answer:
        entries = self.answers.get(path) or [refusal(404, "no such path")]
        return entries.pop(0) if len(entries) > 1 else entries[0]


def body(document: Any, status: int = 200, **headers: str) -> Answer:
    named = {name.replace("_", "-"): value for name, value in headers.items()}
    return Answer([json.dumps(document).encode()], status, {"content-type": JSON, **named})


def refusal(status: int, message: str, **headers: str) -> Answer:
    return body({"error": {"message": message, "type": "x"}}, status, **headers)


def event(document: Any) -> bytes:
    content = document if isinstance(document, str) else json.dumps(document, ensure_ascii=False)
    return f"data: {content}\n\n".encode()


def chat(text: str | None, end: str | None = None, **more: Any) -> dict[str, Any]:
    """A chunk of chat completions."""
    delta = {} if text is None else {"content": text}
    return {"choices": [{"index": 0, "delta": delta, "finish_reason": end}], **more}


def streamed(*parts: Any, done: bool = True) -> Answer:
    """Server-sent events; bytes and None as they are."""
    sent = [part if part is None or isinstance(part, bytes) else event(part) for part in parts]
    return Answer([*sent, *([event("[DONE]")] * done)], headers={"content-type": STREAM})


JSON = "application/json"
STREAM = "text/event-stream; charset=utf-8"
MODELS = body({"object": "list", "data": [{"id": "other"}, {"id": "second"}]})


def said(*texts: str) -> Answer:
    """A whole answer of a chat, with its usage."""
    usage = {"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": len(texts)}}
    role = {"choices": [{"index": 0, "delta": {"role": "assistant"}, "finish_reason": None}]}
    return streamed(role, *map(chat, texts), chat(None, "stop"), usage)


@contextmanager
def replaying(**answers: list[Answer]) -> Iterator[Foreign]:
    """The server; `chat` and `completions` are the answers of these, `models`, `speculation`."""
    places = {"chat": "chat/completions"}
    answers_at = {
        f"/v1/{places.get(name, name)}": list(entries) for name, entries in answers.items()
    }
    server = Foreign({"/v1/models": [MODELS], **answers_at})

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def log_message(self, *_: Any) -> None: ...

        def do_POST(self) -> None:
            self._answer(json.loads(self.rfile.read(int(self.headers["content-length"]))))

        def do_GET(self) -> None:
            self._answer(None)

        def _answer(self, asked: Any) -> None:
            headers = {name.lower(): value for name, value in self.headers.items()}
            server.requests.append((self.path, asked, headers))
            answer = server.next(self.path)
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            self.send_header("connection", "close")  # and so ends a body without a length
            self.end_headers()
            self.close_connection = True
            for part in answer.parts:
                if part is None:
                    server.on.wait(30)
                    continue
                try:
                    self.wfile.write(part)
                    self.wfile.flush()
                except OSError:
                    server.left.set()
                    return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.url = f"http://127.0.0.1:{http.server_address[1]}"
    thread = Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield server
    finally:
        server.on.set()
        http.shutdown()
        thread.join()
        http.server_close()
