"""A connection to a server: its errors in one line, and patience where it asks for that. Does not
know what is asked."""

from __future__ import annotations

import sys
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from time import sleep
from typing import TYPE_CHECKING, Any

from foretoken.cli.sources import TextError
from foretoken.errors import InputError, one_line, shown
from foretoken.storage.files import parse_json

if TYPE_CHECKING:
    from httpx2 import Client, Response

CONNECT, SILENCE = 10.0, 300.0  # seconds until a server must answer, and go on
PATIENCE = 120.0  # seconds that a busy or loading server may ask to wait, in all
WIDEST = 300  # characters of a server's message
DONE = "[DONE]"  # ends a stream


def connected(url: str, key: str | None) -> Client:
    """A client of the server there; InputError for what is no address, or no key."""
    import httpx2  # late: `--help` does without it

    return httpx2.Client(**_options(url, key))


def _options(url: str, key: str | None) -> dict[str, Any]:
    import httpx2

    try:
        base = httpx2.URL(url.strip().rstrip("/").removesuffix("/v1"))
    except httpx2.InvalidURL as error:
        raise InputError(f"url is {shown(url)}: {one_line(error)}") from None
    if base.scheme not in ("http", "https") or not base.host:
        raise InputError(f"url is {shown(url)}; give one such as http://127.0.0.1:8000")
    if key is not None and not (key.isascii() and key.isprintable()):
        raise InputError("the API key holds characters that no header can; give it as it was made")
    headers = {} if not key else {"Authorization": f"Bearer {key}"}
    timeout = httpx2.Timeout(SILENCE, connect=CONNECT)
    return {"base_url": base, "headers": headers, "timeout": timeout}


def get(client: Client, path: str) -> dict[str, Any]:
    """The JSON object there, {} where there is none; raises as `answered` does."""
    try:
        read = parse_json(get_bytes(client, path))
    except ValueError as error:
        if isinstance(error, InputError):
            raise
        return {}
    return read if isinstance(read, dict) else {}


def get_bytes(client: Client, path: str) -> bytes:
    """What is there."""
    with answered(client, "GET", path) as response:
        return response.read()


def place(client: Client) -> str:
    """Its address, as messages have it."""
    return str(client.base_url).rstrip("/")


class RejectedError(InputError):
    """What the server does not take."""


@contextmanager
def answered(client: Client, method: str, path: str, body: Any = None) -> Generator[Response]:
    """The head of a good answer; where the server says when to come again, that is waited for.
    InputError for what it refuses, TextError where it fails."""
    patience = PATIENCE
    while True:
        with named(client), client.stream(method, path, json=body) as response:
            if response.status_code == 200:
                yield response
                return
            response.read()
            detail, status = message(response), response.status_code
            after = _after(response.headers.get("retry-after", ""))
        if status not in (429, 503) or after is None or after > patience:
            raise _error(status, detail)
        print(f"{detail}; again in {after:g} s", file=sys.stderr)
        sleep(after)
        patience -= after


@contextmanager
def named(client: Client) -> Generator[None]:
    """Errors of the connection in one line."""
    import httpx2

    try:
        yield
    except httpx2.ConnectTimeout:
        raise InputError(f"{place(client)} does not answer within {CONNECT:g} s") from None
    except httpx2.ConnectError as error:
        raise InputError(f"{place(client)} cannot be reached: {one_line(error)}") from None
    except httpx2.TimeoutException:
        raise TextError(f"{place(client)} said nothing for {SILENCE:g} s") from None
    except httpx2.HTTPError as error:
        raise TextError(f"{place(client)} broke off: {one_line(error)}") from None


def _error(status: int, reason: str) -> Exception:
    """What a status means."""
    if status == 401:
        return InputError(f"{reason}; give --api-key, or FORETOKEN_API_KEY in the environment")
    return RejectedError(reason) if status < 500 and status != 429 else TextError(reason)


def message(response: Response) -> str:
    """What the body of an error, which has been read, says; or else its status."""
    status = f"the server answers {response.status_code} {response.reason_phrase}".rstrip()
    try:
        error = parse_json(response.content)["error"]
        detail = error["message"] if isinstance(error, dict) else error
    except (ValueError, KeyError, TypeError):
        return status
    return _detail(detail) or status


def chunks(response: Response) -> Iterator[dict[str, Any]]:
    """The chunks of a stream. TextError for an error among them."""
    import httpx2

    for event in httpx2.EventSource(response):
        if event.data == DONE:
            return
        yield _chunk(event.data)


def _chunk(data: str) -> dict[str, Any]:
    try:
        chunk = parse_json(data)
    except ValueError as error:
        raise TextError(f"the server sent no JSON: {one_line(error)}") from None
    if not isinstance(chunk, dict):
        raise TextError(f"the server sent {shown(chunk)}, which is no chunk")
    if error := chunk.get("error"):
        detail = error.get("message") if isinstance(error, dict) else error
        raise TextError(_detail(detail) or "the server failed")
    return chunk


def _detail(detail: object) -> str:
    """A server's words in one line."""
    text = "".join(c if c.isprintable() else " " for c in str(detail or ""))
    return " ".join(text.split())[:WIDEST].rstrip(".")


def _after(header: str) -> float | None:
    """The seconds of a Retry-After, at least one; None where there is none."""
    if header.strip().isdigit():
        return max(1.0, float(header))
    try:
        at = parsedate_to_datetime(header)
    except ValueError:
        return None
    return max(1.0, (at - datetime.now(UTC)).total_seconds()) if at.tzinfo else None
