"""Names that lead to a folder, to the hub, to its cache, or nowhere; none of them takes long."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import huggingface_hub
import pytest
from huggingface_hub import constants

from foretoken.errors import InputError
from foretoken.loading import hub, sources

UNREACHABLE = "http://127.0.0.1:9"


@pytest.fixture(autouse=True)
def fresh() -> None:
    hub._resolve_hub_options.cache_clear()


@pytest.fixture
def online(monkeypatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)


@pytest.fixture
def answers(monkeypatch, online) -> Iterator[list[tuple[int, dict[str, str]]]]:
    """A hub that gives one answer, which a test may change; asked at most once each time."""
    answer = [(404, {"X-Error-Code": "RepoNotFound"})]

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            code, headers = answer[0]
            self.send_response(code)
            for name, value in headers.items():
                self.send_header(name, value)
            self.end_headers()

        def log_message(self, *args: object) -> None:
            pass

    server = HTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    template = f"{constants.ENDPOINT}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    yield answer
    server.shutdown()
    server.server_close()


def refused(name: str, says: str, revision: str | None = None) -> None:
    with pytest.raises(InputError, match=says) as error:
        sources.find_source(name, revision, False)
    assert "\n" not in str(error.value)


def test_the_hub_is_not_asked(tmp_path):
    refused("no-such-folder", "^there is no folder 'no-such-folder', and HF_HUB_OFFLINE prev")
    assert sources.load_tokenizer("no/such", None, False) is None
    refused(str(tmp_path), "revision is 'old', but .* is a folder, which has no revision", "old")


def test_the_hub_cannot_be_reached(monkeypatch, online):
    template = f"{UNREACHABLE}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr("time.sleep", lambda seconds: pytest.fail("it tries again"))
    refused("no-such-folder", "and the hub cannot be reached (.*)")


@pytest.mark.parametrize(
    ("name", "code", "revision", "says"),
    [
        ("no-such-folder", "RepoNotFound", None, "no folder 'no-such-folder', and the hub has no"),
        ("no-such-folder", None, None, "no folder 'no-such-folder', and the hub has no such model"),
        ("a/b", "RevisionNotFound", "old", "the hub has a/b, but no revision 'old'"),
    ],
)
def test_the_hub_has_no_such_model(answers, name, code, revision, says):
    answers[0] = (404, {"X-Error-Code": code} if code else {})
    refused(name, says, revision)


@pytest.mark.parametrize(
    "answer",
    [(200, {}), (403, {"X-Error-Code": "GatedRepo"}), (404, {"X-Error-Code": "EntryNotFound"})],
)
def test_what_is_there_is_left_to_the_library(answers, answer):
    answers[0] = answer
    assert hub.resolve_options("a/b", None) == {}


def test_what_is_in_the_cache_is_read_from_there_alone(answers, monkeypatch):
    answers[0] = (500, {})
    cached_file = lambda name, file, revision: "/kept/config.json"  # noqa: E731
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", cached_file)
    assert hub.resolve_options("a/b", None) == {"local_files_only": True}


def test_a_folder_asks_nobody(tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "_resolve_hub_options", lambda *args: pytest.fail("the hub was asked"))
    assert hub.resolve_options(hub.resolve_path(tmp_path), None) == {}
    for wrong in (tmp_path / "no", "a b", "a/b/c", "x" * 200):
        with pytest.raises(InputError, match="is not a folder"):
            hub.resolve_path(wrong)
    monkeypatch.undo()
    refused("./no", "^'./no' is not a folder")
