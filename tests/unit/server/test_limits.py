"""Keys and bounds, before anything else looks at a request."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from foretoken.server.accounting import Accounting
from foretoken.server.api.errors import BadRequestError
from foretoken.server.limits import Gate, require, salt
from foretoken.server.options import ServerOptions


def scope(path: str = "/v1/models", **headers: str) -> dict[str, Any]:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return {"type": "http", "path": path, "method": "POST", "headers": pairs, "state": {}}


def test_a_key_has_a_salt_of_its_own() -> None:
    keys = ("one", "two")
    salts = {salt(keys, scope(authorization=f"Bearer {key}")) for key in keys}
    assert len(salts) == 2 and None not in salts
    assert "one" not in "".join(str(each) for each in salts)
    for wrong in ("", "one", "Bearer", "Bearer ", "Bearer on", "Bearer one ", "Basic one"):
        assert salt(keys, scope(authorization=wrong)) is None
    assert salt(keys, scope(authorization="bearer one")) in salts
    assert salt(("clé",), scope(authorization="Bearer clé")) is not None
    assert salt(keys, scope()) is None and salt((), scope()) == ""


def test_limits() -> None:
    options = ServerOptions(max_tokens=8, max_texts=2)
    require(options, 2, 8, "max_tokens")
    require(options, 1, None, "max_tokens")
    with pytest.raises(BadRequestError, match="3 texts"):
        require(options, 3, 8, "max_tokens")
    with pytest.raises(BadRequestError, match="max_tokens is 9"):
        require(options, 1, 9, "max_tokens")


@pytest.mark.parametrize("declared", [True, False])
def test_a_body_that_is_too_large(declared: bool) -> None:
    """Also where its length is not said: it is counted as it comes."""
    sent: list[Any] = []
    answers: list[Any] = []

    class Counter:
        def count(self, endpoint: str, status: int) -> None:
            answers.append((endpoint, status))

    async def app(scope: Any, receive: Any, send: Any) -> None:
        while (await receive()).get("more_body"):
            pass

    async def receive() -> Any:
        return {"type": "http.request", "body": b"a" * 60, "more_body": True}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = {"content_length": "101"} if declared else {}
    counter: Any = Counter()
    gate = Accounting(Gate(app, ServerOptions(max_body=100)), counter, lambda path: True)
    asyncio.run(gate(scope(**headers), receive, send))  # type: ignore[arg-type]
    assert sent[0]["status"] == 413 and b"larger than 100 bytes" in sent[1]["body"]
    assert any(name == b"x-request-id" for name, _ in sent[0]["headers"])
    assert answers == [("/v1/models", 413)]
