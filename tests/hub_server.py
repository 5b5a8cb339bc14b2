"""A stand-in of the Hugging Face hub: its HTTP API for lists of models, single models and files,
with answers in the hub's format, on a port of this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import parse_qs, urlsplit

import pytest
from huggingface_hub import constants

from foretoken.loading import named_models

COMMIT = "0" * 40


class Answer(NamedTuple):
    """An unusual answer of the hub, after some seconds."""

    status: int = 200
    code: str | None = None
    data: bytes = b"{}"
    seconds: float = 0


def empty_cache(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache of the hub, and no package with a model."""
    cache = folder / "hub"
    cache.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr("huggingface_hub.utils._cache_manager.HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(named_models, "SMOLLM2_PACKAGE", "a_package_that_nobody_has")
    return cache


def entry(
    name: str,
    *tags: str,
    bf16: int | None = None,
    downloads: int = 0,
    files: dict[str, Any] | None = None,
    **config: Any,
) -> dict[str, Any]:
    """A model as the hub describes it. bf16: its parameters; config: the part of its config in the
    description; files: its config.json, which the description does not have."""
    sizes = None if bf16 is None else {"parameters": {"BF16": bf16}, "total": bf16}
    return {
        "_id": "6578".ljust(24, "0"),
        "id": name,
        "downloads": downloads,
        "tags": ["safetensors", *tags, "region:us"],
        "config": config,
        **({} if sizes is None else {"safetensors": sizes}),
        "file": files,
    }


@contextmanager
def serve_hub(
    models: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    unusual: dict[str, Answer] | None = None,
) -> Iterator[list[tuple[str, dict[str, list[str]]]]]:
    """Serve these models; huggingface_hub uses this hub meanwhile. Yields the requests so far, each
    as its path and its query. `unusual`: the answers to some paths."""
    requests: list[tuple[str, dict[str, list[str]]]] = []

    over = threading.Event()

    def select(query: dict[str, list[str]]) -> list[dict[str, Any]]:
        words = " ".join(query.get("search", ())).lower().split()
        found = [
            each
            for each in models
            if all(word in each["id"].lower() for word in words)
            and all(tag in each["tags"] for tag in query.get("filter", ()))
            and all(each["id"].startswith(f"{owner}/") for owner in query.get("author", ()))
        ]
        if query.get("sort") == ["downloads"]:
            found.sort(key=lambda each: -each["downloads"])
        return [show(each, query) for each in found[: int(query["limit"][0])]]

    def show(model: dict[str, Any], query: dict[str, list[str]]) -> dict[str, Any]:
        return {key: model[key] for key in ("_id", "id", *query["expand"]) if key in model}

    class Hub(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            query = parse_qs(url.query)
            requests.append((url.path, query))
            if unusual and (answer := unusual.get(url.path)) is not None:
                over.wait(answer.seconds)
                return self._send(answer.data, answer.status, answer.code)
            if url.path == "/api/models":
                return self._answer(select(query))
            name = url.path.removeprefix("/api/models/").removeprefix("/")
            name = name.removesuffix("/resolve/main/config.json")
            found = next((each for each in models if each["id"] == name), None)
            if found is None:
                return self._answer({"error": "Repository not found"}, code="RepoNotFound")
            if url.path.startswith("/api/models/"):
                return self._answer(show(found, query))
            if found["file"] is None:
                return self._answer({"error": "Entry not found"}, code="EntryNotFound")
            return self._answer(found["file"])

        do_HEAD = do_GET

        def _answer(self, content: object, code: str | None = None) -> None:
            self._send(json.dumps(content).encode(), 404 if code else 200, code)

        def _send(self, data: bytes, status: int, code: str | None) -> None:
            self.send_response(status)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Type", "application/json; charset=utf-8")
            self.send_header("Content-Length", str(len(data)))
            self.send_header("ETag", f'"{hash(data) % 2**32:032x}"')
            self.send_header("X-Repo-Commit", COMMIT)
            self.end_headers()
            if self.command == "GET" and not over.is_set():
                self.wfile.write(data)

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "ENDPOINT", endpoint)
    template = f"{endpoint}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield requests
    over.set()
    server.shutdown()
    server.server_close()
